"""Every cut of an answer into deltas parses to the same reasoning, content and calls."""

import json
import random

import pytest

from specengine.tool_calls.answer_parser import AnswerFormat, AnswerParser
from specengine.tool_calls.dialects import DIALECTS, HERMES, LLAMA_JSON, MISTRAL, MISTRAL_ARGS, QWEN_XML
from specengine.tool_calls.events import Arguments
from specengine.tool_calls.reasoning import THINK
from tests.tool_calls.recorded import FRAGMENTS, SCHEMA, TOOLS, Answer, check, cuts, meaning, parse, random_answer

CALL = ("get_weather", {"city": "Paris"})
JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 200), marks=pytest.mark.full)], ids=["30", "200"])
def test_every_cut_of_the_recorded_answers_parses_to_what_they_mean(seeds):
    for seed in seeds:
        check(random_answer(seed))


def test_the_recorded_answers_have_every_dialect_and_kind():
    answers = [random_answer(seed) for seed in range(200)]
    for dialect in DIALECTS.values():
        own = [answer for answer in answers if answer.format.dialect is dialect]
        assert {len(answer.calls) for answer in own} == {0, 1, 2, 3}, dialect.name
        assert any(answer.reasoning and answer.calls for answer in own) and any(answer.format.opened for answer in own)


@pytest.mark.parametrize("opening, dialect", [("<tool_call>\n", HERMES), ("[TOOL_CALLS][", MISTRAL)])
def test_a_call_that_is_cut_in_its_second_key_has_no_complete_arguments(opening, dialect):
    for end in ('"', '"argu', '"arguments"', '"arguments": '):
        whole = parse(AnswerFormat(dialect, TOOLS), [opening + '{"name": "search", ' + end])
        assert whole.calls == [("search", "")], end
    invalid = parse(AnswerFormat(dialect, TOOLS), [opening + '{"name": "search", argu}'])
    assert invalid.calls == [("search", "{}")]


HARD_ANSWERS = {
    # vLLM 43221 and 42781: several tokens of a delta hold the end of the reasoning and the beginning of a call
    "reasoning and call together": Answer(
        AnswerFormat(QWEN_XML, TOOLS, THINK, True),
        "Write.</think><tool_call><function=search></function></tool_call>",
        reasoning="Write.",
        calls=[("search", {})],
    ),
    "reasoning and content together": Answer(AnswerFormat(HERMES, TOOLS, THINK, True), "a</think>b", "b", "a"),
    "empty reasoning": Answer(AnswerFormat(HERMES, TOOLS, THINK, True), "</think>\n\nb\n", "b\n"),
    "an empty block": Answer(AnswerFormat(None, {}, THINK), "<think></think>\n\nb", "b"),
    "space alone behind reasoning": Answer(AnswerFormat(HERMES, TOOLS, THINK, True), "a</think>\n\n", "", "a"),
    "space alone behind empty reasoning": Answer(AnswerFormat(HERMES, TOOLS, THINK, True), "\n</think>\n\n", ""),
    # vLLM 40861: closing tags are text where the call does not end behind them
    "closing tags in a value": Answer(
        AnswerFormat(QWEN_XML, TOOLS),
        "<tool_call>\n<function=search>\n<parameter=city>\nuse </parameter> or </function>\nor </tool_call> here\n"
        "</parameter>\n</function>\n</tool_call>",
        calls=[("search", {"city": "use </parameter> or </function>\nor </tool_call> here"})],
    ),
    "a nullable string": Answer(
        AnswerFormat(QWEN_XML, TOOLS),
        "<tool_call><function=search><parameter=note>some text</parameter><parameter=city>null</parameter>"
        "</function></tool_call>done",
        content="done",
        calls=[("search", {"note": "some text", "city": "null"})],
    ),
    "several calls between two tags": Answer(
        AnswerFormat(HERMES, TOOLS),
        f"<tool_call>{JSON_CALL}{JSON_CALL},\n{JSON_CALL}</tool_call>",
        calls=[CALL] * 3,
    ),
    "a call that is opened twice": Answer(
        AnswerFormat(HERMES, TOOLS), f"a<tool_call>\n<tool_call>{JSON_CALL}</tool_call>", content="a", calls=[CALL]
    ),
    "a call in the form of another dialect": Answer(
        AnswerFormat(QWEN_XML, TOOLS), f"a <tool_call>\n{JSON_CALL}\n</tool_call> b", content="a b", calls=[CALL]
    ),
    "JSON that is no call": Answer(
        AnswerFormat(QWEN_XML, TOOLS),
        'a <tool_call>{"name": "x"}</tool_call>',
        content='a <tool_call>{"name": "x"}</tool_call>',
    ),
    "a tag of a call in constrained content": Answer(
        AnswerFormat(QWEN_XML, TOOLS, THINK, True, is_constrained=True),
        'Hm.</think>{"a": "<tool_call><function=search></function></tool_call>"}',
        reasoning="Hm.",
        content='{"a": "<tool_call><function=search></function></tool_call>"}',
    ),
    "calls in place of constrained content": Answer(
        AnswerFormat(HERMES, TOOLS, THINK, True, is_constrained=True),
        f"Hm.</think>\n\n<tool_call>{JSON_CALL}</tool_call>\n<tool_call>{JSON_CALL}</tool_call>",
        reasoning="Hm.",
        calls=[CALL] * 2,
    ),
    "an opening tag that is doubled in a text": Answer(
        AnswerFormat(QWEN_XML, TOOLS), "a <tool_call> <tool_call> b", content="a <tool_call> <tool_call> b"
    ),
    "a call that is closed twice": Answer(
        AnswerFormat(HERMES, TOOLS),
        f"<tool_call>{JSON_CALL}</tool_call>\n</tool_call>done <b>",
        content="done <b>",
        calls=[CALL],
    ),
    "a closing tag that the end cuts": Answer(
        AnswerFormat(HERMES, TOOLS), f"<tool_call>{JSON_CALL}\n</tool_ca", calls=[CALL]
    ),
    "text that begins as a closing tag does": Answer(
        AnswerFormat(HERMES, TOOLS), f"<tool_call>{JSON_CALL}</tool_b", content="</tool_b", calls=[CALL]
    ),
    # vLLM 35421: arguments were serialised twice, by the model or by the server
    "arguments as a string": Answer(
        AnswerFormat(HERMES, TOOLS),
        '<tool_call>{"name": "search", "arguments": "{\\"city\\": \\"a \\\\\\"b\\\\\\"\\"}"}</tool_call>',
        calls=[("search", {"city": 'a "b"'})],
    ),
    # vLLM 43055 and 56077: empty arguments
    "no arguments": Answer(
        AnswerFormat(HERMES, TOOLS),
        '<tool_call>{"name": "search"}</tool_call><tool_call>{"name": "search", "arguments": null}</tool_call>'
        '<tool_call>{"name": "search", "arguments": ""}</tool_call>',
        calls=[("search", {})] * 3,
    ),
    "a missing bracket": Answer(
        AnswerFormat(HERMES, TOOLS),
        f"<tool_call>\n{JSON_CALL[:-1]}\n</tool_call>\n<tool_call>{JSON_CALL}}}</tool_call>",
        calls=[CALL, CALL],
    ),
    "a tag that begins no call": Answer(
        AnswerFormat(HERMES, TOOLS),
        f"The tag <tool_call> is text. <tool_call>{JSON_CALL}",
        "The tag <tool_call> is text.",
        calls=[CALL],
    ),
    "a tag before other JSON": Answer(AnswerFormat(HERMES, TOOLS), '<tool_call>{"a": 1}', '<tool_call>{"a": 1}'),
    "a call that ends the reasoning": Answer(
        AnswerFormat(HERMES, TOOLS, THINK, True),
        f'I want <tool_call>, not <tool_call>{{"name": "x"}}: <tool_call>{JSON_CALL}</tool_call>',
        reasoning='I want <tool_call>, not <tool_call>{"name": "x"}:',
        calls=[CALL],
    ),
    "the outer tag is forgotten": Answer(
        AnswerFormat(QWEN_XML, TOOLS),
        "Now <function=x>: <function=search>\n<parameter=days>\n3\n</parameter>\n</function>",
        "Now <function=x>:",
        calls=[("search", {"days": 3})],
    ),
    "an answer in JSON": Answer(
        AnswerFormat(LLAMA_JSON, TOOLS), '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'
    ),
    "an answer in JSON with other keys": Answer(AnswerFormat(LLAMA_JSON, TOOLS), '{"age": 3} ', '{"age": 3} '),
    "a tag of Python": Answer(
        AnswerFormat(LLAMA_JSON, TOOLS), '<|python_tag|>f.call(x="1")', '<|python_tag|>f.call(x="1")'
    ),
    "a type before the name": Answer(
        AnswerFormat(LLAMA_JSON, TOOLS),
        '\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=[CALL],
    ),
    "a list of Mistral with ids": Answer(
        AnswerFormat(MISTRAL, TOOLS),
        f'[TOOL_CALLS] [{JSON_CALL[:-1]}, "id": "abcdefghi"}},{JSON_CALL}]</s>',
        "</s>",
        calls=[CALL, CALL],
    ),
    "a tag of Mistral as text": Answer(
        AnswerFormat(MISTRAL_ARGS, TOOLS), "[TOOL_CALLS] is a tag", "[TOOL_CALLS] is a tag"
    ),
    "space alone": Answer(AnswerFormat(HERMES, TOOLS), " \n", " \n"),
    "space around a call": Answer(
        AnswerFormat(HERMES, TOOLS), f"\n\n<tool_call>{JSON_CALL}</tool_call>\n\n", calls=[CALL]
    ),
    "space between a text, calls and a text": Answer(
        AnswerFormat(HERMES, TOOLS),
        f"x <tool_call>{JSON_CALL}</tool_call> \n<tool_call>{JSON_CALL}</tool_call>\n y z",
        "x y z",
        calls=[CALL] * 2,
    ),
    "space behind a call alone": Answer(
        AnswerFormat(HERMES, TOOLS), f"x<tool_call>{JSON_CALL}</tool_call> y", "x y", calls=[CALL]
    ),
    "no tools in the request": Answer(
        AnswerFormat(None, {}, THINK), f"<tool_call>{JSON_CALL}", f"<tool_call>{JSON_CALL}"
    ),
}


@pytest.mark.parametrize("answer", HARD_ANSWERS.values(), ids=HARD_ANSWERS)
def test_every_cut_of_a_hard_answer_parses_to_what_it_means(answer):
    check(answer)


TRUNCATED = {
    "arguments": (HERMES, '<tool_call>{"name": "search", "arguments": {"city": "Pa', "", [("search", '{"city": "Pa')]),
    "name": (HERMES, 'Hi <tool_call>{"name": "sea', 'Hi <tool_call>{"name": "sea', []),
    "tag": (HERMES, "Hi <tool_c", "Hi <tool_c", []),
    "before the arguments": (HERMES, '<tool_call>{"name": "search", ', "", [("search", "")]),
    "text value": (QWEN_XML, "<tool_call><function=search><parameter=city>Pa", "", [("search", '{"city": "Pa')]),
    "typed value": (QWEN_XML, "<tool_call><function=search><parameter=days>1", "", [("search", '{"days": ')]),
    "list": (MISTRAL, '[TOOL_CALLS][{"name": "search", "arguments": {}}, {"na', "", [("search", "{}")]),
    "named": (MISTRAL_ARGS, '[TOOL_CALLS]search[ARGS]{"a', "", [("search", '{"a')]),
    "bare": (LLAMA_JSON, '{"name": "search", "parameters": {"a": [', "", [("search", '{"a": [')]),
}


@pytest.mark.parametrize("case", TRUNCATED.values(), ids=TRUNCATED)
def test_the_end_of_the_tokens_cuts_a_call_where_it_is(case):
    """OpenAI reports the call with incomplete arguments. A call without a name is text."""
    dialect, text, content, calls = case
    answer = AnswerFormat(dialect, TOOLS)
    for pieces in cuts(text, random.Random(1)):
        parsed = parse(answer, pieces)
        assert (parsed.content, parsed.calls) == (content, calls), pieces


def test_unfinished_reasoning_is_reasoning():
    answer = AnswerFormat(HERMES, TOOLS, THINK, True)
    for pieces in cuts("so </thi", random.Random(2)):
        assert meaning(parse(answer, pieces)) == ("", "so </thi", [])


def test_pieces_of_arguments_come_before_their_value_ends():
    """A client sees a long argument while it is written (vLLM 43267)."""
    for answer, head in (
        (AnswerFormat(HERMES, TOOLS), '<tool_call>{"name": "search", "arguments": {"city": "'),
        (AnswerFormat(QWEN_XML, TOOLS), "<tool_call><function=search><parameter=city>"),
    ):
        lengths = [len(parse_open(answer, head + "x" * count)) for count in range(1, 6)]
        assert lengths == [lengths[0] + count for count in range(5)]


def parse_open(answer: AnswerFormat, text: str) -> str:
    return "".join(event.text for event in AnswerParser(answer).feed(text) if isinstance(event, Arguments))


@pytest.mark.parametrize(
    "own, text, value",
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, "['a']", "['a']"),
        ({"type": "object"}, "{'a': True, 'b': None}", {"a": True, "b": None}),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"enum": [1, "one"]}, "1", 1),
        ({"enum": ["1", "one"]}, "1", "1"),
        ({"$ref": "#/$defs/day"}, "5", 5),
        ({"$ref": "#/$defs/none"}, "5", "5"),
        ({"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/day"}]}, "5", 5),
        ({}, "5", "5"),
        ({"type": "string"}, "5", "5"),
    ],
)
def test_values_of_xml_have_the_type_of_their_schema(own, text, value):
    schema = {**SCHEMA, "properties": {"x": own}, "$defs": {"day": {"type": "integer"}}}
    written = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    ((_, arguments),) = parse(AnswerFormat(QWEN_XML, {"f": schema}), [written]).calls
    assert json.loads(arguments) == {"x": value} and type(json.loads(arguments)["x"]) is type(value)


def test_a_parser_that_reads_deltas_alone_would_fail():
    """The negative control: pieces parsed one by one lose calls that the growing text has."""
    answer = random_answer(1)
    assert answer.calls
    halves = [answer.text[: len(answer.text) // 2], answer.text[len(answer.text) // 2 :]]
    assert sum(len(parse(answer.format, [half]).calls) for half in halves) != len(answer.calls) or any(
        parse(answer.format, [half]).content for half in halves
    )


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 5000), marks=pytest.mark.full)], ids=str)
def test_broken_answers_parse_alike_however_they_are_cut(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        answer = AnswerFormat(
            rng.choice([None, *DIALECTS.values()]), TOOLS, rng.choice([None, THINK]), rng.random() < 0.5
        )
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 25)))
        whole = parse(answer, [text])
        assert "".join(text[at] for at in whole.offsets) == whole.content, text
        for pieces in (
            [*text],
            *([text[:at], text[at:]] for at in rng.sample(range(len(text) + 1), min(4, len(text)))),
        ):
            assert parse(answer, pieces) == whole, (text, pieces)
