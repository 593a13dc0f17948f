"""The last message of a chat can be continued, as transformers does it."""

from itertools import product

import pytest

from specengine.tokenizer import ChatTemplate
from specengine.tokenizer.chat_template import CHAT_FORMATS

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "trims": CHATML.replace("m.content", "m.content | trim"),
    "trims the left": CHATML.replace("m.content", "m.content.lstrip()"),
    "ends with a note": CHATML + "{{ '[' ~ messages | length ~ ' messages]' }}",
    "drops reasoning": CHATML.replace("m.content", "m.content.split('</think>')[-1].lstrip('\n')"),
    "closes empty reasoning": CHATML.replace(
        "{{ m.content", "{{ '<think>\n\n</think>\n\n' if loop.last }}{{ m.content"
    ),
    "repeats": "{{ messages[-1].content }}|" + CHATML + "{{ messages[-1].content }}.",
    "shouts": CHATML.replace("m.content", "m.content | upper"),
    "forgets": CHATML.replace("{{ m.content }}", "{{ m.content if not loop.last }}"),
    "escapes": CHATML.replace("m.content", "m.content | tojson"),
    "vicuna": CHAT_FORMATS["vicuna"],
    "llama-2": CHAT_FORMATS["llama-2"],
}
CONTENTS = (
    "Sure",
    " Sure ",
    "one\ntwo\n",
    "",
    " ",
    "<think>\nHm",
    "<think>Hm.</think>\n\nSo",
    'a "quoted" é',
    "<|im_end|>",
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_continued_message_is_that_of_transformers(name):
    reference = pytest.importorskip("transformers").utils.chat_template_utils.render_jinja_template
    same = 0
    for content, role in product(CONTENTS, ("assistant", "user")):
        chat = [{"role": "user", "content": "Hi"}, {"role": role, "content": content}]
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        try:
            (expected,), _ = reference([chat], chat_template=TEMPLATES[name], continue_final_message=True, **special)
        except Exception:
            expected = None
        try:
            template = ChatTemplate(TEMPLATES[name], "here", special)
            found = template.render(chat, add_generation_prompt=False, continue_final_message=True)
        except ValueError as error:
            assert str(error).startswith("here: chat template failed: ")
            found = None
        assert found == expected, (content, role)
        same += found is not None
    assert same >= {"shouts": 2, "forgets": 0, "escapes": 8, "llama-2": 8}.get(name, 14)


def test_a_continued_message_excludes_a_new_one():
    chat = [{"role": "assistant", "content": "Sure"}]
    with pytest.raises(ValueError, match=r"^continue_final_message: excludes add_generation_prompt"):
        ChatTemplate(CHATML, "here").render(chat, continue_final_message=True)
    assert chat == [{"role": "assistant", "content": "Sure"}]
