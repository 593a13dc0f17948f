"""`python -m tests.constraints.schema_fuzz --schemas 20000 --broken 100000`: constraints of random schemas.

Every text that a constraint takes as complete fulfils its schema for jsonschema, and every value that fulfils it has a
text that the constraint takes. Broken schemas are refused with a ValueError that names the parameter, or compile.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema
from llguidance import LLMatcher

from specengine import SamplingParams
from specengine.constraints.schemas import fit_schema
from tests.constraints.masks import allowed_tokens
from tests.constraints.random_instances import RandomInstances, twisted, written
from tests.constraints.random_schemas import RandomSchemas, broken
from tests.constraints.vocabulary import ENDS, grammars

SLOWEST = 10  # seconds that a refusal may take
TWISTS = 12  # of each value's text
ENDING = frozenset(b'"]}0e')  # bytes that bring a text to its end


class SchemaFuzz:
    """Tries schemas one by one.  failures: what was wrong, with what repeats it.  counts: what there was."""

    def __init__(self) -> None:
        self.failures: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self._grammars = grammars()

    def try_schema(self, seed: int) -> None:
        try:
            self._try(seed)
        except RecursionError:  # of jsonschema, where a definition is itself and nothing else
            self.counts["endless"] += 1

    def _try(self, seed: int) -> None:
        rng = random.Random(seed)
        schema = RandomSchemas(rng).schema()
        validator, values = _validator(schema), RandomInstances(schema, rng)
        drawn = [values.value() for _ in range(6)]
        self.counts["schemas"] += 1
        try:
            constraint = self._grammars.constraint(SamplingParams(json_schema=schema))
        except ValueError as error:
            self.counts["refused"] += 1
            if not str(error).startswith("json_schema: "):
                self._fail(seed, schema, "", f"refused without a name: {error}")
            # The grammar engine refuses definitions that no value fulfils, whether they are needed or not; long reasons
            # are cut before they say so.
            unsatisfiable = (
                "Unsatisfiable" in (told := str(error)) and "while processing" not in told and len(told) < 300
            )
            if unsatisfiable and (fitting := [each for each in drawn if validator.is_valid(each)]):
                self._fail(seed, schema, written(fitting[0]), f"fulfils it: {error}")
            return
        start: LLMatcher = constraint._start
        for value in drawn:
            text, fits = written(value), validator.is_valid(value)
            self.counts["valid" if fits else "invalid"] += 1
            if fits and _is_plain(value) and not any(behind.is_accepting() for behind in _spellings(start, value)):
                self._fail(seed, schema, text, "is valid and not taken")
            for other in [text, *(twisted(text, rng) for _ in range(TWISTS))]:
                self._judge(seed, schema, validator, other, start)
        self._judge(seed, schema, validator, _walk(constraint, rng), start)

    def _judge(self, seed: int, schema: Any, validator: Any, text: str | None, start: LLMatcher) -> None:
        if text is None or '"0000-' in text or not takes(start, text):  # the year 0 of RFC 3339 is none of Python's
            return
        self.counts["taken"] += 1
        try:
            # Numbers may have more digits than a float.
            right = any(validator.is_valid(json.loads(text, parse_float=kind)) for kind in (float, Decimal))
        except ValueError as error:
            self._fail(seed, schema, text, f"is no JSON: {error}")
            return
        if not right:
            self._fail(seed, schema, text, "is taken and not valid")

    def try_broken(self, seed: int) -> None:
        rng = random.Random(seed)
        schema = broken(RandomSchemas(rng).schema(), rng)
        coverage, closed = rng.choice(("strict", "whole", "lenient")), rng.random() < 0.5
        self.counts["broken"] += 1
        began = time.perf_counter()
        try:
            fitted = fit_schema(schema, "tools[0]", coverage, closed)
            self.counts["fitted"] += 1
            self._grammars.constraint(SamplingParams(json_schema=fitted))
        except ValueError as error:
            self.counts["refused"] += 1
            if not str(error).startswith(("tools[0]: ", "json_schema: ")) or len(str(error)) > 1000:
                self._fail(seed, schema, coverage, f"refused without a name: {error}")
        except BaseException as error:  # a panic of the grammar engine is no Exception
            self._fail(seed, schema, coverage, f"{type(error).__name__}: {error}")
            if isinstance(error, KeyboardInterrupt):
                raise
        if time.perf_counter() - began > SLOWEST:
            self._fail(seed, schema, coverage, "took long")

    def _fail(self, seed: int, schema: Any, text: str, wrong: str) -> None:
        self.failures.append({"seed": seed, "wrong": wrong[:300], "text": text, "schema": schema})


def _validator(schema: Any) -> Any:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker)


def takes(start: LLMatcher, text: str) -> bool:
    matcher, tokens = start.deep_copy(), [*text.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _spellings(matcher: LLMatcher, value: Any) -> Iterator[LLMatcher]:
    """Yields matchers behind the texts of a value; its objects have their keys in any order that is taken."""
    if isinstance(value, dict) and value:
        yield from _fields(matcher, "{", value)
    elif isinstance(value, list) and value:
        behind = [*_fed(matcher, "[")]
        for number, each in enumerate(value):
            behind = [
                done for one in behind for next in _fed(one, ", " if number else "") for done in _spellings(next, each)
            ]
        yield from (done for one in behind for done in _fed(one, "]"))
    else:
        yield from _fed(matcher, written(value))


def _fields(matcher: LLMatcher, before: str, left: dict[str, Any]) -> Iterator[LLMatcher]:
    if not left:
        yield from _fed(matcher, "}")
    for key, value in left.items():
        others = {other: each for other, each in left.items() if other != key}
        for behind in _fed(matcher, f"{before}{written(key)}: "):
            for done in _spellings(behind, value):
                yield from _fields(done, ", ", others)


def _fed(matcher: LLMatcher, text: str) -> Iterator[LLMatcher]:
    copy, tokens = matcher.deep_copy(), [*text.encode()]
    if copy.try_consume_tokens(tokens) == len(tokens):
        yield copy


def _is_plain(value: Any) -> bool:
    """Whether the value has one text in the documented form: no control characters, and digits alone in numbers."""
    text = json.dumps(value)
    return not any(part in text for part in ("\\u0001", "\\u007f", "e-", "e+")) and ".0" not in text


def _walk(constraint: Any, rng: random.Random) -> str | None:
    """Draws a text from the masks, which ends soon: None if it did not."""
    text = b""
    for step in range(120):
        allowed = allowed_tokens(constraint)
        if ENDS & {*allowed} and (step > 60 or rng.random() < 0.5):
            return text.decode("utf-8", "replace")
        ending = [token for token in allowed if token in ENDING] if rng.random() < 0.3 + step / 100 else []
        going_on = ending or [token for token in allowed if token < 256] or [*allowed]
        token = rng.choice(going_on)
        if token in ENDS:
            return text.decode("utf-8", "replace")
        if token >= 256:
            return None
        constraint.advance([token])
        text += bytes([token])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--broken", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schema; the next has the next one")
    options = parser.parse_args()
    fuzz = SchemaFuzz()
    for number in range(options.schemas):
        fuzz.try_schema(options.seed + number)
    for number in range(options.broken):
        fuzz.try_broken(options.seed + number)
    for failure in fuzz.failures[:20]:
        print(json.dumps(failure, ensure_ascii=False, default=str)[:2000])
    print(dict(fuzz.counts), len(fuzz.failures), "failures")
    raise SystemExit(bool(fuzz.failures))


if __name__ == "__main__":
    main()
