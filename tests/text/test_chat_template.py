"""Chat templates: the model's own and the built-in formats."""

import pytest

from specengine.text import ChatTemplate
from specengine.text.chat_template import CHAT_FORMATS, format_for_name

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def render(template: str, *messages: dict, **options) -> str:
    return ChatTemplate(template, "here.jinja", {"bos_token": "<s>"}).render(messages or [USER], **options)


def test_templates_see_messages_special_tokens_and_the_generation_prompt():
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m.content + eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert render(template, USER, ASSISTANT) == "<s>user: Hi\nassistant: Hello.\nassistant:"
    assert render(template, USER, add_generation_prompt=False) == "<s>user: Hi\n"


def test_blocks_leave_no_blank_lines():
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_loops_can_break():
    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", USER, ASSISTANT) == "Hi"


def test_tojson_keeps_html_characters_and_unicode():
    message = {"role": "user", "content": "<a> & 'é'"}
    assert render("{{ messages[0].content | tojson }}", message) == "\"<a> & 'é'\""


def test_the_date_is_available():
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_generation_blocks_are_transparent():
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"


def test_a_template_that_raises_gives_its_message_and_its_file():
    with pytest.raises(ValueError, match=r"here\.jinja: chat template failed: no tools"):
        render("{{ raise_exception('no tools') }}")


@pytest.mark.parametrize("template", ["{{ missing.attribute }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_any_failure_inside_a_template_names_its_file(template):
    with pytest.raises(ValueError, match=r"here\.jinja: chat template failed"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template):
    with pytest.raises(ValueError, match="chat template failed"):
        render(template)


def test_a_syntax_error_names_the_file_and_line():
    with pytest.raises(ValueError, match=r"here\.jinja: chat template is not valid Jinja.*line 2"):
        ChatTemplate("ok\n{% if %}", "here.jinja")


@pytest.mark.parametrize("messages", [None, [], "Hi", USER, {}])
def test_messages_must_be_a_list_that_is_not_empty(messages):
    with pytest.raises(ValueError, match="messages must be a non-empty list"):
        ChatTemplate("x", "here").render(messages)


@pytest.mark.parametrize(
    "message", ["Hi", {"role": "user"}, {"content": "Hi"}, {"role": "user", "content": ["Hi"]}, {"role": 1}]
)
def test_a_malformed_message_is_named_by_its_index(message):
    with pytest.raises(ValueError, match=r"messages\[1\]"):
        ChatTemplate("x", "here").render([USER, message])


def built_in(chat_format: str, special_tokens: dict[str, str] | None = None) -> ChatTemplate:
    return ChatTemplate(CHAT_FORMATS[chat_format], chat_format, special_tokens)


def test_vicuna_format_has_one_system_line_and_ends_assistant_turns():
    vicuna = built_in("vicuna")
    assert vicuna.render([USER]) == f"{VICUNA_SYSTEM} USER: Hi ASSISTANT:"
    expected = f"{VICUNA_SYSTEM} USER: Hi ASSISTANT: Hello.</s>USER: Hi ASSISTANT:"
    assert vicuna.render([USER, ASSISTANT, USER]) == expected
    assert vicuna.render([SYSTEM, USER]) == "Be brief. USER: Hi ASSISTANT:"


def test_llama_2_format_puts_the_system_text_into_the_first_turn():
    llama = built_in("llama-2", {"bos_token": "<s>", "eos_token": "</s>"})
    assert llama.render([USER]) == "<s>[INST] Hi [/INST]"
    expected = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Hi [/INST]"
    assert llama.render([SYSTEM, USER, ASSISTANT, USER]) == expected


@pytest.mark.parametrize(
    ("chat_format", "messages"),
    [
        ("vicuna", [USER, SYSTEM]),
        ("llama-2", [USER, USER]),
        ("llama-2", [ASSISTANT]),
        ("llama-2", [USER, SYSTEM]),
    ],
)
def test_built_in_formats_refuse_roles_out_of_place(chat_format, messages):
    with pytest.raises(ValueError, match=f"{chat_format}: chat template failed: role"):
        built_in(chat_format).render(messages)


@pytest.mark.parametrize(
    ("name", "chat_format"),
    [
        ("vicuna-7b-v1.5", "vicuna"),
        ("Llama-2-7b-chat-hf", "llama-2"),
        ("LLaMA_2_7B_Chat", "llama-2"),
        ("Llama-2-7b-hf", None),
        ("Qwen2-chat", None),
    ],
)
def test_the_format_follows_the_model_name(name, chat_format):
    assert format_for_name(name) == chat_format
