"""The dialect and the reasoning tags of a chat template, and the prompt for templates without tools."""

import pytest

from specengine.tool_calls.dialects import DIALECTS, detect_dialect
from specengine.tool_calls.fallback_prompt import write_tools_as_text
from specengine.tool_calls.reasoning import MISTRAL_THINK, THINK, detect_reasoning

# How the templates of model families write calls.
TEMPLATES = {
    "Qwen3": (r"""{{- '<tool_call>\n{\"name\": \"' }}{{- tool_call.name }}{{- '\", \"arguments\": ' }}""", "hermes"),
    "Hermes 3": ("""{{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}""", "hermes"),
    "Qwen3-Coder": ("""{{- '<tool_call>\n<function=' + name + '>\n' }}{{- '<parameter=' + k + '>' }}""", "qwen-xml"),
    "Llama 3.1": ("""<|start_header_id|>{{- '{"name": "' + name + '", ' }}{{- '"parameters": ' }}""", "llama-json"),
    "Mistral Small 3.1": ("""{{- "[TOOL_CALLS] [" }}{%- set out = tool_call.function|tojson %}""", "mistral"),
    "Mistral Small 3.2": ("""{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}""", "mistral-args"),
    "GLM 4.5": ("""{{- '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>{{ tc.arguments }}""", None),
    "Llama 3.1, other prompt": ("""<function=example>{"a": "b"}</function><|start_header_id|>""", None),
    "Gemma": ("<start_of_turn>{{ tools }}", None),
}


@pytest.mark.parametrize("template, name", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_shows_its_dialect(template, name):
    assert detect_dialect(template) is (DIALECTS[name] if name else None)


def test_a_template_shows_its_reasoning():
    assert detect_reasoning("{{ content.split('</think>') }}") is THINK
    assert detect_reasoning("[THINK]{{ x }}[/THINK]") is MISTRAL_THINK
    assert detect_reasoning("{{ content }}") is None


def test_a_prompt_opens_the_reasoning_only_at_its_end():
    assert THINK.opened_by("user\nhi\nassistant\n<think>\n") and THINK.opened_by("<think>")
    for prompt in ("<think>\n\n</think>\n\n", "<think> in the question", "assistant\n", ""):
        assert not THINK.opened_by(prompt)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "\u00e9"}}}
USER = {"role": "user", "content": "hi"}


def test_tools_are_written_into_the_system_message():
    alone = write_tools_as_text([USER], [TOOL])
    assert [each["role"] for each in alone] == ["system", "user"]
    assert '{"type": "function", "function": {"name": "f", "parameters": {}}}' in alone[0]["content"]
    joined = write_tools_as_text([{"role": "system", "content": "Be kind."}, USER], [TOOL])
    assert joined[0]["content"] == "Be kind.\n\n" + alone[0]["content"] and joined[1] == USER
    assert write_tools_as_text([USER], None) == [USER]


def test_calls_and_results_are_written_as_text():
    results = [{"role": "tool", "content": text, "tool_call_id": "1", "name": "f"} for text in ("one", "two")]
    assistant = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}
    assert write_tools_as_text([USER, assistant, *results, USER], None) == [
        USER,
        {
            "role": "assistant",
            "content": 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": "\u00e9"}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>",
        },
        USER,
    ]
