"""Random damage to answers: arguments stay valid JSON, and no markup becomes content.

SPECENGINE_FUZZED_ANSWERS=100000 sets how many answers run under `-m full`.
"""

import itertools
import json
import os
import random

import pytest

from specengine.tool_calls.dialects import HERMES, LLAMA_JSON, MISTRAL, MISTRAL_ARGS, QWEN_XML
from tests.tool_calls.recorded import FRAGMENTS, parse, random_answer

MANY = int(os.environ.get("SPECENGINE_FUZZED_ANSWERS", "2000"))
CLOSERS = {
    QWEN_XML: ["</tool_call>", "</function>", "</parameter>"],
    HERMES: ["</tool_call>"],
    LLAMA_JSON: [],
    MISTRAL: [],
    MISTRAL_ARGS: [],
}


def damaged(text: str, rng: random.Random) -> str:
    """Deletes, doubles, or inserts a few pieces of a text, or cuts it."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(text))
        end = min(len(text), at + rng.choice([1, 1, 2, 5, 20]))
        kind = rng.choice(["delete", "double", "insert", "insert", "cut"])
        middle = {"delete": "", "double": text[at:end] * 2, "insert": rng.choice(FRAGMENTS), "cut": ""}[kind]
        text = (
            text[:at] + middle + (text[end:] if kind in ("delete", "double") else text[at:] if kind == "insert" else "")
        )
    return text


def check(seed: int) -> int:
    """Checks one damaged answer and returns how many calls it has."""
    rng = random.Random(seed)
    answer = random_answer(seed)
    text = damaged(answer.text, rng)
    whole = parse(answer.format, [text], complete=True)
    for name, arguments in whole.calls:
        json.loads(arguments)
        assert name
    first = call_offset(answer.format, text) if whole.calls else len(text)
    # A dropped tag between two characters joins them, which makes no tag.
    content = [
        (text[at] if before == at - 1 else f" {text[at]}") for before, at in itertools.pairwise([-1, *whole.offsets])
    ]
    assert "</think>" not in "".join(content), (text, whole)
    behind = "".join(each for each, at in zip(content, whole.offsets, strict=True) if at >= first)
    assert not any(tag in behind for tag in CLOSERS[answer.format.dialect]), (text, whole)
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), 4)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    for complete in (True, False):
        assert parse(answer.format, pieces, complete) == parse(answer.format, [text], complete), (text, pieces)
    return len(whole.calls)


def call_offset(answer, text: str) -> int:
    """How many characters have come when the first call is known."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if parse(answer, [text[:middle]]).calls else (middle + 1, high)
    return low


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 150 + MANY), marks=pytest.mark.full)], ids=str)
def test_damaged_answers_keep_their_calls_valid(seeds):
    assert sum(map(check, seeds)) > len(seeds) / 3
