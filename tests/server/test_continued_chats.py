"""A chat's last message is continued on request, and its prompt may lack the beginning of an answer."""

import openai
import pytest

from tests.selection import looped
from tests.server.tools import TOOL

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def ask(client, *messages, **fields):
    body = {"model": "tiny", "messages": [USER, *messages], "max_tokens": 90, "temperature": 0}
    return client.chat.completions.create(**body, extra_body=fields).choices[0].message


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("messages", "fields", "prompt"),
    [
        ([], {}, "[user]hi[assistant]"),
        ([said("Sure: ")], {}, "[user]hi[assistant]Sure: [assistant]"),
        ([said("Sure: ")], {"continue_final_message": False, "add_generation_prompt": True}, "Sure: [assistant]"),
        ([said("Sure: ")], {"add_generation_prompt": False}, "[user]hi[assistant]Sure: "),
        ([said("Sure: ")], {"continue_final_message": True}, "[user]hi[assistant]Sure: "),
        ([said("Sure: ")], {"continue_final_message": True, "add_generation_prompt": False}, "[assistant]Sure: "),
        ([said("So", reasoning_content="Hm")], {"add_generation_prompt": False}, "[assistant]So(thought Hm)"),
        ([said("So", reasoning_content="Hm")], {"continue_final_message": True}, "[user]hi[assistant]So"),
        ([said("a"), USER], {"continue_final_message": True}, "[assistant]a[user]hi"),
        ([], {"add_generation_prompt": False}, "[user]hi"),
    ],
)
def test_the_prompt_ends_where_the_request_says(serve, messages, fields, prompt):
    client, script = serve("plain", " More.")
    assert ask(client, *messages, **fields).content == " More."
    assert script.prompts[0].endswith(prompt)


def test_a_message_without_content_cannot_be_continued(serve):
    client, _ = serve("hermes", "x")
    with pytest.raises(openai.BadRequestError, match="continue_final_message: the last message has no content"):
        ask(client, said(None, tool_calls=[CALL]), continue_final_message=True)


@looped(
    "begun, text, reasoning, content",
    [
        ("<think>Let me", " see.</think>\nSo", "see.", "So"),
        ("<think>a</think>b<think>", " see.</think>\nSo", "see.", "So"),
        ("<think>a</think>b", " see. So", None, " see. So"),
        ("b", " see. So", None, " see. So"),
        ("", " see. So", None, " see. So"),
    ],
)
def test_what_continues_reasoning_is_reasoning(serve, begun, text, reasoning, content):
    client, script = serve("thinking", text)
    message = ask(client, said(begun), continue_final_message=True)
    assert script.prompts[0].endswith(f"[assistant]{begun}")
    assert (getattr(message, "reasoning", None), message.content) == (reasoning, content)


def test_a_continued_answer_may_call_tools(serve):
    client, script = serve("hermes", ' <tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>')
    message = ask(client, said("Let me look."), continue_final_message=True, tools=[TOOL])
    assert message.tool_calls[0].function.name == "get_weather" and script.prompts[0].endswith("Let me look.")
