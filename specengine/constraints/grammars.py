"""Compiles constraints for one tokenizer, and keeps the last ones."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

from specengine.constraints.base import Constraint
from specengine.constraints.choices import regex_of
from specengine.constraints.constraint import GrammarConstraint, reason
from specengine.constraints.gbnf import as_lark
from specengine.constraints.lark_text import bound_forcing, check_names, without_literals
from specengine.constraints.least_tokens import LeastTokens
from specengine.constraints.multiples import check_multiples
from specengine.constraints.vocabulary import read_vocabulary
from specengine.tokenizer import Tokenizer
from specengine.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

KEPT = 64  # compiled grammars: an agent's tools in all their combinations; a large schema takes about a megabyte
# Work of one mask, at most: about 70 ms. Of 300 random expressions llguidance's own limit of a fifth gave up on one.
STEP_FUEL = 1_000_000
ITEMS = 20_000  # of the grammar that may stand at one place: an optional key takes four, and the default is 2,000
# JSON is written as json.dumps writes it. Models know this form best, and every space between two values is forced:
# where the grammar allows any whitespace, small models write spaces until their tokens run out.
JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """The constraints of one tokenizer; several threads may call it.

    tokenizer: None for a model without one, which refuses every constraint.  eos_token_ids: end a text.
    vocab_size: of the model.  kept: compiled grammars, at most; the one unused for longest goes first.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, eos_token_ids: Collection[int], vocab_size: int, kept: int = KEPT
    ) -> None:
        self._tokenizer, self._eos, self._vocab_size, self._kept = tokenizer, eos_token_ids, vocab_size, kept
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()  # of the dictionary: grammars compile side by side, without the GIL
        self._reading = threading.Lock()  # of the vocabulary

    def __len__(self) -> int:
        return len(self._compiled)

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """Returns the constraint at the beginning of a text; None where the parameters have none.

        Raises ValueError naming the parameter, and the place in it, where it is malformed, unsupported, or where no
        text fulfils it.
        """
        if (name := params.constraint) is None:
            return self._least_tokens(params)
        if self._tokenizer is None:
            raise ValueError(f"{name}: this model has no tokenizer, so no text can be constrained")
        if params.grammar is not None:
            known, text = self._tokenizer.vocab_size, self._tokenizer.token_text
            ends = {token: text(token) if token < known else f"<[{token}]>" for token in self._eos}
            check_names(as_lark(params.grammar), ends)
        grammar = compiled_form(params)
        with self._lock:
            if first := (compiling := self._compiled.get(grammar)) is None:
                compiling = self._compiled[grammar] = Future()
                if len(self._compiled) > self._kept:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
        assert compiling is not None
        if first:
            try:
                compiling.set_result(self._compile(name, grammar))
            except BaseException as error:
                with self._lock:
                    if self._compiled.get(grammar) is compiling:
                        del self._compiled[grammar]
                compiling.set_exception(error)
        return GrammarConstraint(compiling.result(), self._eos, self._vocab_size, params)

    def _least_tokens(self, params: SamplingParams) -> LeastTokens | None:
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}.intersection(range(self._vocab_size))
        if not params.min_tokens or not ends:
            return None
        if len(ends) >= self._vocab_size:
            raise ValueError("min_tokens: stop_token_ids are all tokens of the model, so every token ends the text")
        return LeastTokens(params.min_tokens, ends, self._vocab_size)

    def _compile(self, name: str, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        assert self._tokenizer is not None
        with self._reading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = read_vocabulary(self._tokenizer, self._eos, self._vocab_size)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        # A schema is the caller's own and no matter of logs.
        limits = LLParserLimits(step_lexer_fuel=STEP_FUEL, max_items_in_row=ITEMS, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"{name}: {reason(matcher)}")
        first = matcher.deep_copy()  # computing a mask may leave it in an error for good
        allowed = first.compute_bitmask()
        if first.is_error() or not any(allowed):
            raise ValueError(f"{name}: no text fulfils it")
        token = next(place * 8 + bit for place, byte in enumerate(allowed) for bit in range(8) if byte >> bit & 1)
        if not first.try_consume_tokens([token]) and first.is_error():
            fault = reason(first)
            if "ff_tokens" in fault:
                fault = "it forces a text without an end: no finite text fulfils it"
            raise ValueError(f"{name}: {fault}")
        return matcher


def compiled_form(params: SamplingParams) -> str:
    """Returns the constraint as a grammar in llguidance's own form."""
    from llguidance import LLMatcher

    name = params.constraint
    if name == "json_schema":
        assert isinstance(params.json_schema, str)  # SamplingParams keeps its text
        try:
            check_multiples(json.loads(params.json_schema), name)
        except RecursionError:
            raise ValueError(f"{name}: is nested too deeply") from None
        schema = params.json_schema if params.json_schema != "{}" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_FORM)
    if name == "regex":
        assert params.regex is not None
        return LLMatcher.grammar_from_regex(params.regex)
    if name == "grammar":
        assert params.grammar is not None
        return LLMatcher.grammar_from_lark(bound_forcing(_with_json_form(as_lark(params.grammar))))
    return LLMatcher.grammar_from_regex(regex_of(params.choices or ()))


def _with_json_form(grammar: str) -> str:
    """Gives JSON inside of a Lark grammar the form of other JSON; a schema that chooses its own keeps it."""
    parts, end = [], 0
    for found in re.finditer(r"%json\s*(?=\{)", without_literals(grammar)):
        if found.start() < end:  # inside of a schema's own text
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(grammar, found.end())
        except ValueError:  # the grammar engine says where it is wrong
            continue
        except RecursionError:
            raise ValueError("grammar: its JSON is nested too deeply") from None
        check_multiples(schema, "grammar")
        if not isinstance(own := schema.get("x-guidance", {}), dict):  # the grammar engine refuses it
            continue
        options = {**JSON_FORM, **own}
        parts += [grammar[end : found.end()], json.dumps({**schema, "x-guidance": options})]
        end = after
    return "".join([*parts, grammar[end:]])
