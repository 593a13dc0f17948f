"""Grammars of answers accept what the parsers read, and refuse what the request forbids."""

import functools
import json
import random

import llguidance
import pytest

from specengine.tool_calls.answer_parser import AnswerFormat
from specengine.tool_calls.call_grammar import FunctionSchema
from specengine.tool_calls.dialects import DIALECTS, HERMES, LLAMA_JSON, MISTRAL, MISTRAL_ARGS, QWEN_XML
from specengine.tool_calls.grammar import Enforced, write_grammar
from specengine.tool_calls.reasoning import THINK
from tests.selection import looped
from tests.tool_calls.recorded import Answer, meaning, parse

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
IDS = {tag: 256 + number for number, tag in enumerate(TAGS)}
EOS = 256 + len(TAGS)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/count"},
        "unit": {"enum": ["C", "F"]},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1}},
}
FUNCTIONS = (
    FunctionSchema("get_weather", SCHEMA),
    FunctionSchema("now", {"type": "object", "properties": {}, "additionalProperties": False}),
)
TOOLS = {each.name: each.schema for each in FUNCTIONS}


class Bytes:
    """A tokenizer of bytes, and of tags if `tags` holds their ids."""

    def __init__(self, tags: dict[str, int]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b""] * (EOS + 1 - 256)
        for text, token in tags.items():
            self.tokens[token] = text.encode()
        self.tokens[EOS] = b"</s>"
        self.special_token_ids = [*tags.values(), EOS]
        self.eos_token_id, self.bos_token_id = EOS, None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def vocabulary(tags: dict[str, int]) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(tags)), eos_token=[EOS])


PLAIN, TAGGED = vocabulary({}), vocabulary(IDS)


def encode(text: str, tags: dict[str, int]) -> list[int]:
    """Encodes a text whose tags are marked: \\1 begins and \\2 ends a tag that is structure."""
    ids = []
    for number, part in enumerate(text.replace("\2", "\1").split("\1")):
        ids += [tags[part]] if number % 2 and part in tags else [*part.encode()]
    return ids


def tag(text: str) -> str:
    return f"\1{text}\2"


def bare(text: str) -> str:
    return text.replace("\1", "").replace("\2", "")


@functools.lru_cache
def compiled(grammar: str, tagged: bool) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(TAGGED if tagged else PLAIN, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepted(grammar: str, text: str, tags: dict[str, int]) -> bool:
    """Whether a text, complete, is of a grammar's language."""
    matcher = compiled(grammar, bool(tags)).deep_copy()
    ids = encode(text, tags)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def call(dialect, name: str, arguments: dict) -> str:
    """A call with its opening tag, in the form of the grammar."""
    written = json.dumps(arguments, ensure_ascii=False)
    if dialect is HERMES:
        return f'{tag("<tool_call>")}\n{{"name": "{name}", "arguments": {written}}}\n{tag("</tool_call>")}'
    if dialect is QWEN_XML:
        values = {key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()}
        lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"{tag('<tool_call>')}\n<function={name}>\n{lines}</function>\n{tag('</tool_call>')}"
    if dialect is LLAMA_JSON:
        return f'{{"name": "{name}", "parameters": {written}}}'
    if dialect is MISTRAL:
        return f'{tag("[TOOL_CALLS]")}[{{"name": "{name}", "arguments": {written}}}]'
    return f"{tag('[TOOL_CALLS]')}{name}{tag('[ARGS]')}{written}"


def calls(dialect, *each: tuple[str, dict]) -> str:
    texts = [call(dialect, *one) for one in each]
    if dialect is MISTRAL:
        opening = tag("[TOOL_CALLS]") + "["
        return opening + ", ".join(text.removeprefix(opening)[:-1] for text in texts) + "]"
    return {LLAMA_JSON: "; ", MISTRAL_ARGS: ""}.get(dialect, "\n").join(texts)


WEATHER = ("get_weather", {"city": 'a "b" \u00e9\n<', "days": 3, "unit": "F"})
NOW = ("now", {})
WRONG = [
    ("get_weather", {"city": "x"}),
    ("get_weather", {"city": "x", "days": 0}),
    ("get_weather", {"city": "x", "days": 1, "unit": "K"}),
    ("get_weather", {"city": "x", "days": 1, "more": 1}),
    ("get_weather", {"city": "x", "days": "three"}),
    ("now", {"city": "x"}),
    ("then", {}),
]
FORMS = [
    (None, False, ""),
    (THINK, True, f"Hm <b> {{.{tag('</think>')}\n\n"),
    (THINK, False, f"{tag('<think>')}Hm.{tag('</think>')}"),
]


ANY = {"city": "a <b>", "more_of-it": "3\n4"}
LOOSE = {
    "any object": ({"type": "object"}, [{}, ANY], []),
    "open": (SCHEMA | {"additionalProperties": True}, [{"city": "x", "days": 3, **ANY}], [ANY, {"days": 3}]),
    "a required key without a schema": (
        {"type": "object", "required": ["city"]},
        [ANY, {"city": "x"}],
        [{}, {"more_of-it": "3"}],
    ),
    "a reference": (
        {"$ref": "#/$defs/x", "$defs": {"x": SCHEMA, **SCHEMA["$defs"]}},
        [{"city": "x", "days": 3}],
        [{}, ANY, {"city": "x", "days": 0}],
    ),
}


@pytest.mark.parametrize("tags", [{}, IDS], ids=["text", "tokens"])
@looped("case", LOOSE)
def test_xml_calls_have_other_parameters_where_the_schema_is_open(case, tags):
    schema, good, wrong = LOOSE[case]
    answer = AnswerFormat(QWEN_XML, {"get": schema})
    grammar = write_grammar(answer, Enforced((FunctionSchema("get", schema),)), tags)
    for arguments in good:
        text = calls(QWEN_XML, ("get", arguments))
        assert accepted(grammar, text, tags) and meaning(parse(answer, [bare(text)]))[2] == [("get", arguments)]
    assert not any(accepted(grammar, calls(QWEN_XML, ("get", each)), tags) for each in wrong)
    twice = calls(QWEN_XML, ("get", {"city": "x", "days": 3, "more": "x"})).replace("more", "days")
    assert accepted(grammar, twice, tags) == (schema.get("type") == "object" and "properties" not in schema)


@pytest.mark.parametrize("tags", [{}, IDS], ids=["text", "tokens"])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_calls_are_enforced(dialect, tags):
    for reasoning, opened, thought in FORMS:
        answer = AnswerFormat(dialect, TOOLS, reasoning, opened)
        required = write_grammar(answer, Enforced(FUNCTIONS, required=True), tags)
        one = write_grammar(answer, Enforced(FUNCTIONS, required=True, parallel=False), tags)
        auto = write_grammar(answer, Enforced(FUNCTIONS), tags)
        auto_one = write_grammar(answer, Enforced(FUNCTIONS, parallel=False), tags)
        for good in (WEATHER, NOW):
            text = thought + calls(dialect, good)
            assert all(accepted(each, text, tags) for each in (required, one, auto, auto_one)), text
            assert meaning(parse(answer, [bare(text)]))[2] == [good]
        both = thought + calls(dialect, WEATHER, NOW)
        assert [accepted(each, both, tags) for each in (required, one, auto, auto_one)] == [True, False, True, False]
        assert meaning(parse(answer, [bare(both)]))[2] == [WEATHER, NOW]
        for wrong in WRONG:
            text = thought + calls(dialect, wrong)
            assert not any(accepted(each, text, tags) for each in (required, one, auto, auto_one)), text
        free = thought + "Just {text} <b> [x]."
        assert [accepted(each, free, tags) for each in (required, one, auto, auto_one)] == [False, False, True, True]
        if not dialect.bare:
            mixed = thought + "Let me see.\n" + calls(dialect, WEATHER) + "\nSo."
            assert [accepted(each, mixed, tags) for each in (required, auto, auto_one)] == [False, True, True]
            assert parse(answer, [bare(mixed)]).content == "Let me see.\nSo."


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_a_tag_that_is_spelled_with_other_tokens_begins_no_free_call(dialect):
    """The parser reads spelled tags too, so free text must not hold them."""
    grammar = write_grammar(AnswerFormat(dialect, TOOLS), Enforced(FUNCTIONS), IDS)
    for opener in dialect.openers:
        assert accepted(grammar, f"a {opener[:-1]}", IDS) and not accepted(grammar, f"a {opener} b", IDS)


def test_reasoning_holds_no_call_and_no_spelled_end():
    answer = AnswerFormat(HERMES, TOOLS, THINK, True)
    for tags in ({}, IDS):
        grammar = write_grammar(answer, Enforced(FUNCTIONS, required=True), tags)
        text = call(HERMES, *NOW)
        assert accepted(grammar, f"Hm.{tag('</think>')}{text}", tags)
        assert not accepted(grammar, f"Hm <tool_call>.{tag('</think>')}{text}", tags)
    assert not accepted(grammar, f"Hm </think>.{tag('</think>')}{text}", IDS)


def test_an_answer_may_have_a_schema_beside_calls():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with pytest.raises(ValueError, match="this model's calls are JSON too"):
        write_grammar(AnswerFormat(LLAMA_JSON, TOOLS), Enforced(FUNCTIONS, content={"json_schema": schema}), IDS)
    for dialect in (HERMES, QWEN_XML, MISTRAL, MISTRAL_ARGS):
        grammar = write_grammar(AnswerFormat(dialect, TOOLS), Enforced(FUNCTIONS, content={"json_schema": schema}), IDS)
        assert accepted(grammar, '{"a": 1}', IDS) and accepted(grammar, calls(dialect, WEATHER), IDS)
        assert not accepted(grammar, "free", IDS) and not accepted(grammar, '{"b": 1}', IDS)


def test_an_answer_with_a_schema_may_reason_first():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for tags in ({}, IDS):
        opened = write_grammar(AnswerFormat(None, {}, THINK, True), Enforced(content={"json_schema": schema}), tags)
        assert accepted(opened, f'Hm {{"a": "b"}}.{tag("</think>")}\n\n{{"a": 1}}', tags)
        assert not accepted(opened, '{"a": 1}', tags)
        free = write_grammar(AnswerFormat(None, {}, THINK, False), Enforced(content={"json_schema": schema}), tags)
        assert accepted(free, f'{tag("<think>")}Hm.{tag("</think>")}{{"a": 1}}', tags) and accepted(
            free, '{"a": 1}', tags
        )


@pytest.mark.parametrize("tags", [{}, IDS], ids=["text", "tokens"])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_every_text_of_a_grammar_parses_to_valid_calls(dialect, tags):
    """Random walks through the grammar, as a model with random weights would take."""
    jsonschema = pytest.importorskip("jsonschema")
    answer = AnswerFormat(dialect, TOOLS, THINK, True)
    matcher = compiled(write_grammar(answer, Enforced(FUNCTIONS, required=True), tags), bool(tags))
    for seed in range(8):
        text = walk(matcher.deep_copy(), random.Random(seed), tags)
        parsed = parse(answer, [text])
        assert parsed.calls and not parsed.content, text
        for name, arguments in parsed.calls:
            jsonschema.validate(json.loads(arguments), TOOLS[name])


CLOSING = (b"</think>", b"\n</parameter>", b'"', b"}", b",", b" ")


def walk(matcher: llguidance.LLMatcher, rng: random.Random, tags: dict[str, int]) -> str:
    """Takes random allowed tokens. Often it tries a tag, because random letters would never spell one."""
    names = {token: text.encode() for text, token in tags.items()}
    text, wanted = b"", b""
    while not (matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.5)):
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(EOS) if mask[token // 8] >> token % 8 & 1 and not 128 <= token < 256]
        if not wanted and rng.random() < 0.3:
            wanted = rng.choice(CLOSING)
        special = [token for token in allowed if token >= 256]
        token = rng.choice(special if special and rng.random() < 0.3 else allowed)
        if wanted and wanted[0] in allowed:
            token, wanted = wanted[0], wanted[1:]
        else:
            wanted = b""
        assert matcher.consume_token(token)
        text += names.get(token, bytes([token % 256]))
        assert len(text) < 5000
    return text.decode()


def test_a_text_of_xml_holds_no_tag_that_may_end_it():
    grammar = write_grammar(AnswerFormat(QWEN_XML, TOOLS), Enforced(FUNCTIONS, required=True), {})
    for value, good in (
        ("a < b <x> <function=now>", True),
        ("a\n<parameter=days>\n3", False),
        ("a\n</parameter", False),
        ("a</function>\n", False),
        ("a\n</tool_call>", False),
        ("<tool_call>\n<function=now>\n</function>", False),
    ):
        text = bare(call(QWEN_XML, "get_weather", {"city": value, "days": 3}))
        assert accepted(grammar, text, {}) == good, value
        if good:
            assert meaning(parse(AnswerFormat(QWEN_XML, TOOLS), [text]))[2] == [
                ("get_weather", {"city": value, "days": 3})
            ]


def test_a_function_name_or_key_is_quoted():
    functions = (FunctionSchema("a", {"type": "object", "properties": {'k"\\': {"type": "string"}}}),)
    for dialect in DIALECTS.values():
        grammar = write_grammar(AnswerFormat(dialect, TOOLS), Enforced(functions, required=True), {})
        assert accepted(grammar, call(dialect, "a", {'k"\\': "x"}), {})


def test_recorded_answers_of_the_grammar_s_form_are_accepted():
    """The negative control of the refusals above: a longer conversation with all kinds of values passes."""
    arguments = {"city": "Paris", "days": 12, "unit": "C", "place": {"x": -1.5}}
    for dialect in DIALECTS.values():
        answer = Answer(AnswerFormat(dialect, TOOLS), calls(dialect, ("get_weather", arguments)))
        grammar = write_grammar(answer.format, Enforced(FUNCTIONS, required=True), IDS)
        assert accepted(grammar, answer.text, IDS)
