"""Compiles constraints for one tokenizer, and keeps the last ones."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING

from specengine.constraints.base import Constraint
from specengine.constraints.choices import regex_of
from specengine.constraints.constraint import GrammarConstraint, reason
from specengine.constraints.gbnf import as_lark
from specengine.constraints.lark_text import bound_forcing, check_depth, check_names, without_literals
from specengine.constraints.least_tokens import LeastTokens
from specengine.constraints.schemas import fit_schema
from specengine.constraints.text_size import text_size
from specengine.constraints.vocabulary import read_vocabulary
from specengine.tokenizer import Tokenizer
from specengine.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # compiled grammars: an agent's tools in all their combinations
KEPT_TEXT = 2**19  # characters of them all; each takes up to 370 bytes, most in enumerations and patterns
# Work of one mask, at most: about 70 ms. Of 300 random expressions llguidance's own limit of a fifth gave up on one.
STEP_FUEL = 1_000_000
ITEMS = 20_000  # of the grammar that may stand at one place: an optional key takes four, and the default is 2,000


class _Compiled:
    """A grammar that is compiled once, by the first thread that asks; others wait."""

    def __init__(self, size: int) -> None:
        self.size, self.lock = size, threading.Lock()
        self.matcher: LLMatcher | None = None


class Grammars:
    """The constraints of one tokenizer; several threads may call it.

    tokenizer: None for a model without one, which refuses every constraint.  eos_token_ids: end a text.
    vocab_size: of the model.  kept, kept_text: compiled grammars, and characters of their texts, at most; the one
    unused for longest goes first, the last one stays whatever its length.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        vocab_size: int,
        kept: int = KEPT,
        kept_text: int = KEPT_TEXT,
    ) -> None:
        self._tokenizer, self._eos, self._vocab_size = tokenizer, eos_token_ids, vocab_size
        self._most, self._most_text = kept, kept_text
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Hashable, _Compiled] = OrderedDict()
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
        key = name, getattr(params, name)
        grammar = self._keep(key)
        with grammar.lock:
            try:
                grammar.matcher = grammar.matcher or self._compile(name, self._form(params))
            finally:
                if grammar.matcher is None:
                    self._forget(key, grammar)
            return GrammarConstraint(grammar.matcher, self._eos, self._vocab_size, params)

    def _keep(self, key: tuple[str, str | tuple[str, ...]]) -> _Compiled:
        with self._lock:
            if key not in self._compiled:
                texts = [key[1]] if isinstance(key[1], str) else key[1]
                self._compiled[key] = _Compiled(sum(map(text_size, texts)))
            self._compiled.move_to_end(key)
            size = sum(each.size for each in self._compiled.values())
            while len(self._compiled) > 1 and (len(self._compiled) > self._most or size > self._most_text):
                size -= self._compiled.popitem(last=False)[1].size
            return self._compiled[key]

    def _forget(self, key: Hashable, grammar: _Compiled) -> None:
        with self._lock:
            if self._compiled.get(key) is grammar:
                del self._compiled[key]

    def _form(self, params: SamplingParams) -> str:
        if params.grammar is not None:
            assert self._tokenizer is not None
            known, text = self._tokenizer.vocab_size, self._tokenizer.token_text
            ends = {token: text(token) if token < known else f"<[{token}]>" for token in self._eos}
            grammar = as_lark(params.grammar)
            check_depth(grammar)
            check_names(grammar, ends)
        return compiled_form(params)

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
        if not (fault := _fault(matcher)):
            return matcher
        del matcher  # the traceback of the error would keep its memory
        raise ValueError(f"{name}: {fault}")


def _fault(matcher: LLMatcher) -> str:
    """Returns why a grammar has no text; empty where it has one."""
    if matcher.is_error():
        return reason(matcher)
    first = matcher.deep_copy()  # computing a mask may leave it in an error for good
    allowed = first.compute_bitmask()
    if first.is_error() or not any(allowed):
        return "no text fulfils it"
    token = next(place * 8 + bit for place, byte in enumerate(allowed) for bit in range(8) if byte >> bit & 1)
    if first.try_consume_tokens([token]) or not first.is_error():
        return ""
    fault = reason(first)
    return "it forces a text without an end: no finite text fulfils it" if "ff_tokens" in fault else fault


def compiled_form(params: SamplingParams) -> str:
    """Returns the constraint as a grammar in llguidance's own form."""
    from llguidance import LLMatcher

    name = params.constraint
    if name == "json_schema":
        assert isinstance(params.json_schema, str)  # SamplingParams keeps its text
        schema = fit_schema(json.loads(params.json_schema) or {"type": "object"}, name)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if name == "regex":
        assert params.regex is not None
        return LLMatcher.grammar_from_regex(params.regex)
    if name == "grammar":
        assert params.grammar is not None
        return LLMatcher.grammar_from_lark(bound_forcing(_with_json_form(as_lark(params.grammar))))
    return LLMatcher.grammar_from_regex(regex_of(params.choices or ()))


def _with_json_form(grammar: str) -> str:
    """Fits the JSON schemas inside of a Lark grammar; they get the form of other JSON unless they choose their own."""
    parts, end = [], 0
    for found in re.finditer(r"%json\s*(?=\{)", without_literals(grammar)):
        if found.start() < end:  # inside of a schema's own text
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(grammar, found.end())
        except ValueError:  # the grammar engine says where it is wrong
            break
        except RecursionError:
            raise ValueError("grammar: its JSON is nested too deeply") from None
        parts += [grammar[end : found.end()], json.dumps(fit_schema(schema, "grammar"))]
        end = after
    return "".join([*parts, grammar[end:]])
