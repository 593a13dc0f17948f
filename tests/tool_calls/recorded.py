"""Answers in all dialects, as models write them, and what they mean."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from specengine.tool_calls.answer_parser import AnswerFormat, AnswerParser
from specengine.tool_calls.dialects import DIALECTS, HERMES, LLAMA_JSON, MISTRAL, MISTRAL_ARGS, QWEN_XML, Dialect
from specengine.tool_calls.events import Arguments, Content, Reasoning, ToolStart
from specengine.tool_calls.reasoning import THINK

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "metric": {"type": "boolean"},
        "place": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = {"get_weather": SCHEMA, "search": SCHEMA}
# Text that parsers confuse with structure.
HARD = [
    *(
        "Paris",
        "",
        "two\nlines",
        'a "quoted" word',
        "back\\slash",
        "\u00e9\u4e2d\U0001f600",
        "{",
        "}]",
        "</tool_call>",
        "<tool_call>",
    ),
    *(
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]{}",
        "<function=search>",
        "a </parameter> b",
        "</function> c",
        "; {",
        "<",
        "\\u0041",
    ),
]


# Pieces of broken answers.
FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=search>", "</function>", "<parameter=city>"),
    *("</parameter>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "search", "get_weather", '"name"'),
    *('"arguments"', '"parameters"', ": ", ", ", "{", "}", "[", "]", '"', "\\", "\n", " ", "x", "1", "null", ";", "<"),
    *(
        '{"name": "search", "arguments": ',
        '{"city": "a"}',
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "\u00e9\U0001f600",
        "<function=",
        "<param",
    ),
]


@dataclass(frozen=True)
class Answer:
    """A text and what a parser must find in it."""

    format: AnswerFormat
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, object]] = field(default_factory=list)


@dataclass
class Parsed:
    """The joined events of an answer.  offsets: where the characters of the content stand in the text."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    offsets: list[int]


def parse(answer: AnswerFormat, pieces: list[str], complete: bool = False) -> Parsed:
    parser = AnswerParser(answer)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(complete)
    parsed = Parsed("", "", [], [])
    for event in events:
        if isinstance(event, Content):
            parsed.content += event.text
            parsed.offsets += range(event.at, event.at + len(event.text))
        elif isinstance(event, Reasoning):
            parsed.reasoning += event.text
        elif isinstance(event, ToolStart):
            parsed.calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            name, arguments = parsed.calls[-1]
            parsed.calls[-1] = (name, arguments + event.text)
    assert len(parsed.calls) == parser.num_calls
    return parsed


def meaning(parsed: Parsed) -> tuple[str, str, list[tuple[str, object]]]:
    return parsed.content, parsed.reasoning, [(name, json.loads(arguments)) for name, arguments in parsed.calls]


def cuts(text: str, rng: random.Random) -> list[list[str]]:
    """All single cuts, every character by itself, and random cuts."""
    found = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    found.append([*text])
    for _ in range(10):
        places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(2, 12))))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


def check(answer: Answer, complete: bool = False) -> None:
    """Parses every cut of an answer. Events may come in other pieces, but never joined to another result."""
    whole = parse(answer.format, [answer.text], complete)
    assert meaning(whole) == (answer.content, answer.reasoning, answer.calls), answer.text
    assert "".join(answer.text[at] for at in whole.offsets) == whole.content
    for pieces in cuts(answer.text, random.Random(0)):
        assert parse(answer.format, pieces, complete) == whole, pieces


def random_arguments(rng: random.Random, dialect: Dialect) -> dict[str, object]:
    values = {
        "city": lambda: rng.choice(HARD),
        "days": lambda: rng.randint(-9, 99),
        "ratio": lambda: rng.choice([0.5, -1e-3, 2.0]),
        "metric": lambda: rng.random() < 0.5,
        "place": lambda: {rng.choice(HARD): rng.choice(HARD), "deep": [{}, [], {"a": rng.choice(HARD)}]},
        "tags": lambda: rng.sample(HARD, rng.randint(0, 3)),
        "note": lambda: rng.choice([None, "text"]),
    }
    names = rng.sample(sorted(values), rng.randint(0, 4))
    return {name: values[name]() for name in names}


def write_json(rng: random.Random, value: object) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.3, indent=rng.choice([None, None, 2]))


def write_object(rng: random.Random, name: str, arguments: object, key: str = "arguments") -> str:
    """A call as JSON: sometimes the name comes last, or the arguments are a string of JSON."""
    written = write_json(rng, arguments)
    if rng.random() < 0.15:
        written = json.dumps(written)
    parts = [f'"name": "{name}"', f'"{key}": {written}']
    if rng.random() < 0.15:
        parts.reverse()
    return "{" + rng.choice([", ", ",", ",\n "]).join(parts) + "}"


def write_xml(rng: random.Random, name: str, arguments: dict[str, object]) -> str:
    values = {key: value if isinstance(value, str) else write_json(rng, value) for key, value in arguments.items()}
    lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items()]
    return "\n".join([f"<function={name}>", *lines, "</function>"])


def write_calls(rng: random.Random, dialect: Dialect, calls: list[tuple[str, dict[str, object]]]) -> str:
    space = rng.choice(["\n", "", " "])
    if dialect is HERMES:
        return "\n".join(f"<tool_call>{space}{write_object(rng, *call)}{space}</tool_call>" for call in calls)
    if dialect is QWEN_XML:
        return "\n".join(f"<tool_call>\n{write_xml(rng, *call)}\n</tool_call>" for call in calls)
    if dialect is LLAMA_JSON:
        head = rng.choice(["", "<|python_tag|>"])
        return head + "; ".join(write_object(rng, *call, "parameters") for call in calls)
    if dialect is MISTRAL:
        return f"[TOOL_CALLS]{space}[" + ", ".join(write_object(rng, *call) for call in calls) + "]"
    assert dialect is MISTRAL_ARGS
    middle = rng.choice(["[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]"])
    return "".join(f"[TOOL_CALLS]{name}{middle}{write_json(rng, arguments)}" for name, arguments in calls)


def random_answer(seed: int) -> Answer:
    rng = random.Random(seed)
    dialect = list(DIALECTS.values())[seed % len(DIALECTS)]
    calls = [(rng.choice(sorted(TOOLS)), random_arguments(rng, dialect)) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
    content = "" if calls and (dialect is LLAMA_JSON or rng.random() < 0.5) else "Let me see < it [x] {\u00e9}."
    text = content + rng.choice(["", "\n", "\n\n"]) + write_calls(rng, dialect, calls) if calls else content
    kind = rng.choice(["none", "tagged", "opened"])
    reasoning = "" if kind == "none" else rng.choice(["Hm.", "a < b, {x}\n\nso: <tool_call> or [TOOL_CALLS]?", ""])
    if kind != "none":
        text = (
            {"tagged": "<think>\n", "opened": ""}[kind] + reasoning + rng.choice(["</think>", "\n</think>\n\n"]) + text
        )
    return Answer(AnswerFormat(dialect, TOOLS, THINK, kind == "opened"), text, content, reasoning, calls)
