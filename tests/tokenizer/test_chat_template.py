"""Chat templates: the model's own and the built-in formats."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specengine.tokenizer import ChatTemplate, template_child
from specengine.tokenizer.chat_template import CHAT_FORMATS, format_for_name
from specengine.tokenizer.template_process import TEMPLATES

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


def test_templates_get_tools_and_further_variables():
    template = "{{ (tools or []) | length }}{{ depth }}{{ messages[0].tool_calls[0].function.arguments.a }}"
    call = {"function": {"name": "f", "arguments": {"a": "b"}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render(template, message, tools=[{}, {}], variables={"depth": 3}) == "23b"
    assert ChatTemplate(template, "here").reads == {"tools", "depth", "messages"}
    assert "own" not in ChatTemplate("{% set own = 1 %}", "here").reads


def test_a_message_without_content_needs_calls():
    with pytest.raises(ValueError, match=r"messages\[0\]\['content'\]"):
        render("x", {"role": "assistant", "content": None, "tool_calls": []})


def test_a_variable_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="a variable is not a JSON value"):
        render("x", variables={"depth": object()})


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


# --- templates that exceed the limits -----------------------------------------------------------------

LIMITS = {
    "a long range": ("{% for i in range(10**9) %}x{% endfor %}", "range"),
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "processor time",
    ),
    "a long text": ("{{ 'a' * 10**10 }}", "MemoryError"),
    "a large power": ("{{ 9 ** (9 ** 9) }}", "processor time"),
    "a wide filter": ("{{ 'a' | center(10**10) }}", "MemoryError"),
    "doubling": ("{% set x = 'aaaaaaaa' %}" + "{% set x = x ~ x %}" * 40, "MemoryError|processor time"),
    "shared lists": ("{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}", "MemoryError|processor time"),
    "recursion": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "branching recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "processor",
    ),
    "an answer without end": ("{{ 'x' * 17000000 }}", "17000000 characters, expected at most"),
    "nested blocks": ("{% for i in [1] %}" * 60 + "{% endfor %}" * 60, "nested"),
}


@pytest.mark.parametrize("template, reason", LIMITS.values(), ids=LIMITS)
def test_a_template_that_wants_too_much_is_a_short_error_and_the_next_one_is_rendered(template, reason):
    with pytest.raises(ValueError, match=rf"here\.jinja: chat template failed: .*({reason})") as caught:
        render(template)
    assert len(str(caught.value)) < 700
    assert render("{{ messages[0].content }}") == "Hi"


@pytest.mark.parametrize(
    "template", ["{{ " + "[" * 3000 + "]" * 3000 + " }}", "{{ 1" + " + 1" * 30_000 + " }}", "x" * 200_000]
)
def test_a_template_too_deep_or_too_long_is_refused(template):
    with pytest.raises(ValueError, match=r"here\.jinja: chat template"):
        render(template)


CONFINED = """
import socket, sys
sys.path.append(sys.argv[1])
import template_child
template_child._confine()
for attempt in (lambda: open("/etc/hostname"), lambda: open("new", "w"), socket.socket):
    try:
        attempt()
    except OSError as error:
        print("refused")
    else:
        print("done")
"""


def test_where_templates_run_no_file_and_no_connection_can_be_opened(tmp_path):
    command = [sys.executable, "-c", CONFINED, str(Path(template_child.__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 3
    assert not any(tmp_path.iterdir())


def test_threads_share_the_process_and_get_their_own_texts():
    with ThreadPoolExecutor(4) as threads:
        texts = threads.map(
            lambda n: render("{{ messages[0].content }}", {"role": "user", "content": f"{n}"}), range(50)
        )
    assert list(texts) == [f"{n}" for n in range(50)]


def test_a_process_that_was_killed_is_replaced():
    assert render("{{ messages[0].content }}") == "Hi"
    os.kill(TEMPLATES._child.process.pid, signal.SIGKILL)
    TEMPLATES._child.process.wait()
    assert render("{{ messages[0].content }}") == "Hi"


def test_a_process_that_cannot_start_is_an_error_of_the_text(monkeypatch):
    TEMPLATES.close()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ValueError, match=r"here\.jinja: chat template failed: .*cannot start.*nowhere"):
        render("x")
    monkeypatch.undo()
    assert render("x") == "x"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the test forks a process that has threads
def test_a_forked_process_renders_in_one_of_its_own():
    assert render("{{ messages[0].content }}") == "Hi"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if render("{{ messages[0].role }}") == "user" else 1)
    assert render("{{ messages[0].content }}") == "Hi"
    assert os.waitpid(pid, 0)[1] == 0
    assert render("{{ messages[0].content }}") == "Hi"
