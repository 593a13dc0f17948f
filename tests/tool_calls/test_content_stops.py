"""Stop strings end the content of an answer, and are not searched in its reasoning, tags and calls."""

import random

import pytest

from specengine.tokenizer import StopStrings
from specengine.tool_calls.answer_events import parse_answer
from specengine.tool_calls.answer_parser import AnswerFormat
from specengine.tool_calls.content_stops import ContentStops
from specengine.tool_calls.dialects import DIALECTS, HERMES, LLAMA_JSON, QWEN_XML
from specengine.tool_calls.events import Content
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.reasoning import THINK
from tests.tool_calls.recorded import FRAGMENTS, TOOLS, cuts, parse

OPENED = AnswerFormat(HERMES, TOOLS, THINK, True)
CALL = '<tool_call>\n{"name": "search", "arguments": {"city": "two six"}}\n</tool_call>'


def stopped(answer: AnswerFormat, pieces: list[str], stops: list[str]) -> tuple[str, int | None]:
    """The text before the stop string, and the number of the piece that completes it, or None."""
    search, text = ContentStops(answer, stops), ""
    for number, piece in enumerate(pieces):
        found, ends = search.feed(piece)
        text += found
        if ends:
            assert search.matched in stops and search.feed("x") == ("", True)
            return text, number
    return text + search.finish(), None


# The format, a text, the stop strings, and the rest of the text behind the cut; None: it is not cut.
CASES = {
    "reasoning": (OPENED, "one two</think>three", ["two"], None),
    "content": (OPENED, "one two</think>three two four", ["two"], "two four"),
    "content like reasoning": (OPENED, "two</think>two", ["two"], "two"),
    "several": (OPENED, "two</think>three four", ["four", "ee"], "ee four"),
    "a closing tag": (OPENED, "a</think>b", ["</", "k>", "think"], None),
    "an opening tag": (AnswerFormat(None, {}, THINK), "<think>a</think>b", ["k>", "<"], None),
    "a second block": (OPENED, "a</think>b<think>two</think>c two", ["two", "<"], "two"),
    "space behind a tag": (OPENED, "a\n</think>\n\nb\n\nc", ["\n\n"], "\n\nc"),
    "a call": (OPENED, f"a</think>b{CALL}c two", ["two", "six", "tool", "{"], "two"),
    "space behind calls": (OPENED, f"a</think>{CALL}\n\n{CALL}\n\n b\n\nc", ["\n\n"], "\n\nc"),
    "across a call": (OPENED, f"a</think>fo{CALL}ur four", ["four"], "four"),
    "a part before a call": (OPENED, f"a</think>fo{CALL}", ["four"], None),
    "a tag that is none": (OPENED, "a</think>b <tool_x two", ["l_x"], "l_x two"),
    "a call that is none": (OPENED, 'a</think><tool_call>{"a": "two"}', ["two"], 'two"}'),
    "a tag within a stop string": (OPENED, "a</think>b <tool_call> c", ["<tool_call> c"], "<tool_call> c"),
    "a draft in the reasoning": (OPENED, f"a {CALL} two</think>b two", ["two"], "two"),
    "XML": (
        AnswerFormat(QWEN_XML, TOOLS),
        "a<tool_call><function=search><parameter=city>two</parameter></function></tool_call>two",
        ["two", "city"],
        "two",
    ),
    "a bare call": (AnswerFormat(LLAMA_JSON, TOOLS), '{"name": "search", "parameters": {"a": "two"}}', ["two"], None),
    "JSON that is no call": (AnswerFormat(LLAMA_JSON, TOOLS), '{"name": "Bob", "a": "two"}', ["two"], 'two"}'),
}


@pytest.mark.parametrize("answer, text, stops, behind", CASES.values(), ids=CASES)
def test_only_the_content_is_searched(answer, text, stops, behind):
    expected = text if behind is None else text.removesuffix(behind)
    for pieces in cuts(text, random.Random(0)):
        found, number = stopped(answer, pieces, stops)
        assert found == expected, pieces
        assert (number is None) == (behind is None), pieces


def test_a_text_ends_with_the_character_that_completes_a_stop_string():
    for text, stop in (
        (f"one two</think>{CALL} three two", "two"),
        ("a</think>b\n\n", "\n\n"),
        ("a</think>x<t>", "<t>"),
    ):
        assert stopped(OPENED, [*text, *"four"], [stop]) == (text.removesuffix(stop), len(text) - 1)


def test_content_behind_reasoning_that_never_ends_is_searched_at_the_end():
    for pieces in cuts(f"a two {CALL} b two", random.Random(0)):
        assert stopped(OPENED, pieces, ["two"]) == (f"a two {CALL} b ", None)


def test_a_call_is_delivered_while_it_is_written():
    """Stop strings hold back what they may cut, and nothing of a call."""
    text = f"a</think>Let me see.\n{CALL}"
    for end in range(text.index("city"), len(text) - 20):
        search = ContentStops(OPENED, ["\nUser:"])
        assert search.feed(text[:end]) == (text[:end], False)


def searched(answer: AnswerFormat, text: str, stops: list[str]) -> int | None:
    """Where the first stop string of a whole text begins: the reference."""
    growing = GrowingText()
    growing.feed(text)
    growing.end()
    runs: list[list[int]] = []  # from where to where the text is content
    for event in parse_answer(growing, answer):
        if isinstance(event, Content):
            if runs and runs[-1][1] == event.at:
                runs[-1][1] += len(event.text)
            else:
                runs.append([event.at, event.at + len(event.text)])
    for start, end in runs:
        run = text[start:end]
        skipped = len(run) - len(run.lstrip()) if start else 0
        before, found = StopStrings(stops).feed(run[skipped:])
        if found:
            return start + skipped + len(before)
    return None


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 5000), marks=pytest.mark.full)], ids=str)
def test_every_division_of_a_broken_answer_is_cut_alike(seeds):
    num_cut = 0
    for seed in seeds:
        rng = random.Random(seed)
        tags = rng.choice([None, THINK])
        answer = AnswerFormat(rng.choice([None, *DIALECTS.values()]), TOOLS, tags, rng.random() < 0.5)
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 25)))
        stops = ["".join(rng.choices(FRAGMENTS, k=rng.randint(1, 2)))[rng.choice([0, 1]) :] or "x" for _ in range(2)]
        at = searched(answer, text, stops)
        num_cut += at is not None
        places = sorted(rng.sample(range(len(text) + 1), min(len(text), 6)))
        for pieces in ([text], [*text], [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]):
            found, _ = stopped(answer, pieces, stops)
            assert found == text[:at], (text, stops, pieces)
        cut, whole = parse(answer, [text[:at]]), parse(answer, [text])
        assert whole.content.startswith(cut.content.rstrip()), (text, stops)
    assert num_cut > len(seeds) / 10


def test_no_stop_string_ends_where_none_may():
    search = ContentStops(OPENED, ["two"])
    pieces = [("a</think>x tw", True), ("o y", False), (" two z", True)]
    assert [search.feed(*piece) for piece in pieces] == [("a</think>x ", False), ("two y", False), (" ", True)]
