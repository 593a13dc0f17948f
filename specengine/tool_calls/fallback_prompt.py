"""Describes tools to models whose chat template does not read `tools`: as text, in the form of the Hermes dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """\
# Tools

You may call functions to answer the user. These functions exist, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, write its name and arguments as a JSON object between tags:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": VALUE}}}}
</tool_call>"""


def write_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Returns the messages with tools, calls and results written as text.

    The system message ends with the tools, and is added if there is none. Results become a message of the user,
    because templates without tools know no other role.
    """
    written: list[dict[str, Any]] = []
    previous = ""
    for message in messages:
        role = message["role"]
        if role == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if previous == "tool":
                written[-1]["content"] += f"\n{result}"
            else:
                written.append({"role": "user", "content": result})
        else:
            name = {"name": message["name"]} if "name" in message else {}
            written.append({"role": role, "content": _content(message), **name})
        previous = role
    if not tools:
        return written
    instructions = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if written and written[0]["role"] == "system":
        written[0]["content"] = f"{written[0]['content']}\n\n{instructions}"
        return written
    return [{"role": "system", "content": instructions}, *written]


def _content(message: Mapping[str, Any]) -> str:
    """Returns the content of a message, and its calls behind it."""
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        function = {key: call["function"][key] for key in ("name", "arguments")}
        texts.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(texts)
