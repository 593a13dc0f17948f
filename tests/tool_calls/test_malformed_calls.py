"""Malformed calls keep what can be kept: their markup is no content, and their arguments are valid JSON."""

import itertools
import json

import pytest

from specengine.tool_calls.answer_parser import AnswerFormat
from specengine.tool_calls.dialects import HERMES, LLAMA_JSON, MISTRAL, MISTRAL_ARGS, QWEN_XML
from tests.tool_calls.recorded import TOOLS as LOOSE
from tests.tool_calls.recorded import Answer, check, parse

PROPERTIES = {"text": {"type": "string"}, "day": {"type": "integer"}}
TOOLS = {"note": {"type": "object", "properties": PROPERTIES}, "search": {"type": "object", "properties": PROPERTIES}}
DAY = "<parameter=day>\n3\n</parameter>"
BOTH = {"text": "hello", "day": 3}

# What stands between <function=note> and </function>, and the arguments of the call.
PARAMETERS = {
    "a name without its bracket": (f"<parameter=text\nhello\n</parameter>\n{DAY}", {"day": 3}),
    "a word like an end": ("<parameter=text>\n</parameters>\n</parameter>", {"text": "</parameters>"}),
    "a name without its bracket, alone": ("<parameter=text\nhello\n</parameter>", {}),
    "a name that another tag cuts": (f"<parameter=text{DAY}", {"day": 3}),
    "no name": (f"<parameter=>hello</parameter>{DAY}", {"day": 3}),
    "no end before the next": (f"<parameter=text>\nhello\n{DAY}", BOTH),
    "no end before the next on the same line": (f"<parameter=text>hello{DAY}", BOTH),
    "no end of three": (
        "<parameter=text>\na\n<parameter=day>\n3\n<parameter=text>\nhello",
        {"text": "hello", "day": 3},
    ),
    "no end of a typed value": (
        "<parameter=day>\n3\n<parameter=text>\nhello\n</parameter>",
        {"day": 3, "text": "hello"},
    ),
    "no end of the last": ("<parameter=text>\nhello\n</parameter>\n<parameter=day>\n3", BOTH),
    "no end of a text at the end": ("<parameter=day>\n3\n</parameter>\n<parameter=text>\nhello", BOTH),
    "space around names": ("<parameter= text >\nhello\n</parameter>\n<parameter=day >\n3\n</parameter>", BOTH),
    "quotes around names": (f'<parameter="text">\nhello\n</parameter>\n{DAY}', BOTH),
    "text between": (f"Now <parameter=text>hello</parameter> and {DAY} done", BOTH),
    "two ends": (f"<parameter=text>hello</parameter></parameter>{DAY}</parameter>", BOTH),
    "ends without their bracket": ("<parameter=text>\nhello\n</parameter\n<parameter=day>\n3\n</parameter", BOTH),
    "an early end of the function": (f"<parameter=text>hello</parameter></function>{DAY}", BOTH),
    "an unknown tag in a text": (
        f"<parameter=text>a <parameter=x> b</parameter>{DAY}",
        {"text": "a <parameter=x> b", "day": 3},
    ),
    "nothing": ("", {}),
    "only text": ("hello", {}),
}
# How the call ends, and how it begins.
ENDS = [
    "\n</function\n</tool_call",
    "\n</function>\n</tool_call>",
    "</function></tool_call>",
    "\n</tool_call>",
    "</function></function>\n</tool_call></tool_call>",
]
BEGINS = ["<tool_call>\n<function=note>\n", "<tool_call><function= note >", "<tool_call>\n<function=note\n"]


BEHIND = ["", "\nDone.", f"\n{BEGINS[0]}{DAY}{ENDS[0]}"]
FRAMES = [*itertools.product(BEGINS, ENDS, BEHIND)]


@pytest.mark.parametrize("frames", [1, pytest.param(9, marks=pytest.mark.full)])
def test_a_malformed_xml_call_keeps_what_can_be_kept(frames):
    for number, (inside, arguments) in enumerate(PARAMETERS.values()):
        for step in range(frames):
            begin, end, behind = FRAMES[(5 * number + 7 * step) % len(FRAMES)]
            content, more = ("", [("note", {"day": 3})]) if "<" in behind else (behind.strip(), [])
            text = begin + inside + end + behind
            check(Answer(AnswerFormat(QWEN_XML, TOOLS), text, content, calls=[("note", arguments), *more]))


@pytest.mark.parametrize(
    "inside, arguments",
    [
        (f"{DAY}", {"day": 3}),
        ("<parameter=day>\n3", {"day": 3}),
        ("<parameter=day>\n3\n</para", {"day": 3}),
        ("<parameter=text>hello\n", {"text": "hello"}),
        (f"{DAY}\n</func", {"day": 3}),
        (f"{DAY}<parameter=te", {"day": 3}),
        ("", {}),
    ],
)
def test_an_xml_call_that_its_model_leaves_open_is_closed(inside, arguments):
    for begin in ("<tool_call>\n<function=note>\n", "<function=note>"):
        check(Answer(AnswerFormat(QWEN_XML, TOOLS), begin + inside, calls=[("note", arguments)]), complete=True)


def test_a_mention_of_a_function_s_tag_is_text():
    for text in ("Use <function=note> for it.", "<tool_call> or <function=note>, you know"):
        check(Answer(AnswerFormat(QWEN_XML, TOOLS), text, text), complete=True)


def test_a_call_that_is_not_closed_ends_where_the_next_begins():
    for value in ("<parameter=day>\n3\n</parameter>", "<parameter=day>\n3"):
        one = f"<tool_call>\n<function=note>\n{value}\n"
        check(Answer(AnswerFormat(QWEN_XML, TOOLS), one * 3, calls=[("note", {"day": 3})] * 3), complete=True)


JSON = {
    "a raw newline": ('{"text": "a\n\tb"}', {"text": "a\n\tb"}),
    "escapes that JSON lacks": (r'{"text": "\d \' \x41 C:\dir"}', {"text": r"\d ' \x41 C:\dir"}),
    "an escape that is cut": (r'{"text": "\u12"}', {"text": r"\u12"}),
    "commas": ('{"text": "a",, "day": [1, 2,],}', {"text": "a", "day": [1, 2]}),
    "no commas": ('{"text": "a" "day": [1 "b"]\n"x": 2}', {"text": "a", "day": [1, "b"], "x": 2}),
    "Python": ("{'text': None, 'day': [True, False, 'it']}", {"text": None, "day": [True, False, "it"]}),
    "words": ("{text: New York, day: 10:30, x: 01}", {"text": "New York", "day": "10:30", "x": "01"}),
    "no values": ('{"text": , "day", "x":}', {"text": None, "day": None, "x": None}),
    "doubled brackets": ('{{"text": "a"}}', {"text": "a"}),
    "a bracket of another kind": ('{"text": [1, 2}', {"text": [1, 2]}),
    "numbers that are none": ('{"x": NaN, "y": -Infinity}', {"x": "NaN", "y": "-Infinity"}),
}
WRITTEN = {
    HERMES: '<tool_call>\n{"name": "note", "arguments": %s}\n</tool_call>',
    MISTRAL: '[TOOL_CALLS][{"name": "note", "arguments": %s}]',
    LLAMA_JSON: '{"name": "note", "parameters": %s}',
    MISTRAL_ARGS: "[TOOL_CALLS]note[ARGS]%s",
}


@pytest.mark.parametrize("written, arguments", JSON.values(), ids=JSON)
def test_malformed_json_is_mended(written, arguments):
    for dialect, call in WRITTEN.items():
        check(Answer(AnswerFormat(dialect, TOOLS), call % written, calls=[("note", arguments)]))
    early = f'<tool_call>{{"arguments": {json.dumps(written)}, "name": "note"}}</tool_call>'
    check(Answer(AnswerFormat(HERMES, TOOLS), early, calls=[("note", arguments)]))


def test_valid_json_stays_as_it_is():
    written = '{"a" : [ ] , "b":{ } , "c": [ -1.5e+3 ,"\\u00e9\\n" ,\n true, null ]\n}'
    for dialect, call in WRITTEN.items():
        assert parse(AnswerFormat(dialect, TOOLS), [call % written]).calls == [("note", written)]


@pytest.mark.parametrize(
    "cut, arguments",
    [
        ('{"text": "a', {"text": "a"}),
        ('{"text": "a\\', {"text": "a"}),
        ('{"text": "a\\u00', {"text": "a"}),
        ('{"text": "a", ', {"text": "a"}),
        ('{"text": [1, {"b', {"text": [1, {"b": None}]}),
        ('{"text": ', {"text": None}),
        ('"{\\"text\\": \\"a', {"text": "a"}),
        ("{", {}),
        ("", {}),
    ],
)
def test_a_json_call_that_its_model_leaves_open_is_closed(cut, arguments):
    for dialect, call in WRITTEN.items():
        if dialect is MISTRAL_ARGS and not cut.startswith("{"):
            continue  # its calls begin with the bracket
        text = call[: call.index("%")] + cut
        check(Answer(AnswerFormat(dialect, TOOLS), text, calls=[("note", arguments)]), complete=True)


def test_what_is_no_json_within_a_call_is_no_content():
    for call in (
        '{"name": "note", "arguments": {"day": 3}, oops}',
        '{"name": "note", "arguments": {"day": 3}, "x": }}',
    ):
        check(
            Answer(AnswerFormat(HERMES, TOOLS), f"<tool_call>{call}</tool_call>ok", "ok", calls=[("note", {"day": 3})])
        )
    text = '<tool_call>{"name": "note", "arguments": {"day": 3}} and </tool_call> more'
    check(Answer(AnswerFormat(HERMES, TOOLS), text, "and  more", calls=[("note", {"day": 3})]))


ROWS = {
    HERMES: ("<tool_call>", '{"name": "note", "arguments": {"day": 3}}', "</tool_call>"),
    LLAMA_JSON: ("", '{"name": "note", "parameters": {"day": 3}}', ""),
    MISTRAL: ("[TOOL_CALLS]", '[{"name": "note", "arguments": {"day": 3}}]', ""),
    MISTRAL_ARGS: ("[TOOL_CALLS]", 'note[ARGS]{"day": 3}', ""),
    QWEN_XML: ("", f"<tool_call>\n<function=note>\n{DAY}\n</function>\n</tool_call>", ""),
}


@pytest.mark.parametrize("between", ["", "\n", " \n\n", ";", "; ", ",\n"])
@pytest.mark.parametrize("dialect", ROWS, ids=[dialect.name for dialect in ROWS])
def test_calls_in_a_row_are_all_found(dialect, between):
    opener, call, closer = ROWS[dialect]
    for behind in ("", "\nDone."):
        text = opener + between.join([call] * 3) + closer + behind
        check(Answer(AnswerFormat(dialect, TOOLS), text, behind.strip(), calls=[("note", {"day": 3})] * 3))
    own = opener + call + closer
    check(Answer(AnswerFormat(dialect, TOOLS), own + between, calls=[("note", {"day": 3})]))
    if opener:
        check(Answer(AnswerFormat(dialect, TOOLS), own + between + own, calls=[("note", {"day": 3})] * 2))


def test_json_behind_a_call_that_is_none_is_text():
    for dialect in (LLAMA_JSON, MISTRAL, MISTRAL_ARGS):
        opener, call, _ = ROWS[dialect]
        for other in ('{"name": "Bob"}', "{x}", 'other[ARGS]{"day": 3}'):
            check(
                Answer(
                    AnswerFormat(dialect, LOOSE | TOOLS),
                    f"{opener}{call}\n{other}",
                    other,
                    calls=[("note", {"day": 3})],
                )
            )
