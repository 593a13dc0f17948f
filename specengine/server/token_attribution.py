"""A text that comes in parts, and the tokens behind it: who proposed each, and its log-probability."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from specengine.tokenizer import Tokenizer
from specengine.types import CycleTrace, GenerationOutput, StreamEvent, TokenLogprob


@dataclass
class Part:
    """What an event adds to a text.

    logprobs: of the tokens whose text begins in what is told so far, with the places where it begins.
    tokens: (text, who proposed it), together the part's text.  cycles: nodes, depth and accepted nodes of each tree.
    """

    index: int
    text: str
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    tokens: list[tuple[str, str]] = field(default_factory=list)
    cycles: list[dict[str, int]] = field(default_factory=list)
    output: GenerationOutput | None = None


class Pieces:
    """Of one text.  prompt: its token ids; a text's first space may depend on how the prompt ends.  drafter: its name.

    Text is told when it is certain: not while a character is incomplete, or may begin a stop string. So a token's text
    is told later than the token, and never where a stop string cuts it off; its log-probability likewise.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Seq[int], drafter: str) -> None:
        self._drafter = self._owner = drafter
        self._detokenizer = tokenizer.detokenizer()
        self._detokenizer.feed(prompt[-4:])
        self._told = self._length = 0  # characters told, and of all tokens
        self._untold: deque[tuple[str, str]] = deque()
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()

    def part(self, event: StreamEvent) -> Part:
        """What the next event adds."""
        owners = [owner for cycle in event.trace or () for owner in owners_of(cycle, self._drafter)]
        logprobs = event.logprobs
        if event.trace is not None or logprobs is not None:
            for number, token in enumerate(event.token_ids):
                piece = self._detokenizer.feed([token])
                if event.trace is not None:
                    self._untold.append((piece, owners[number]))
                if logprobs is not None:
                    self._logprobs.append((self._length, logprobs[number]))
                self._length += len(piece)
        self._told += len(event.text)
        part = Part(event.index, event.text, output=event.output)
        while self._logprobs and self._logprobs[0][0] < self._told:
            part.logprobs.append(self._logprobs.popleft())
        if event.trace is not None:
            part.tokens = [*self._cut(event.text)]
            part.cycles = [_counts(cycle) for cycle in event.trace]
        return part

    def _cut(self, text: str) -> Iterator[tuple[str, str]]:
        """A text as the pieces of its tokens."""
        while self._untold and (text or not self._untold[0][0]):
            piece, self._owner = self._untold.popleft()
            if len(piece) > len(text):
                self._untold.appendleft((piece[len(text) :], self._owner))
                piece = text
            text = text[len(piece) :]
            if piece:
                yield piece, self._owner
        if text:  # what stands for a character that was left incomplete
            yield text, self._owner


def owners_of(cycle: CycleTrace, drafter: str) -> list[str]:
    """Who proposed each token of a cycle: the drafter (of a combination its parts), `bonus` behind a drafted path, and
    `root` where nothing was drafted."""
    sources = cycle.sources or ((drafter,),) * len(cycle.accepted)
    owners = ["+".join(names) or drafter for names in sources]
    if cycle.bonus is not None:
        owners.append("bonus" if len(cycle.tokens) > 1 else "root")
    return owners


def _counts(cycle: CycleTrace) -> dict[str, int]:
    depths = [0] * len(cycle.parents)
    for node, parent in enumerate(cycle.parents[1:], start=1):
        depths[node] = depths[parent] + 1
    return {"nodes": len(cycle.tokens), "depth": max(depths), "accepted": len(cycle.accepted)}


def logprobs_of_chat(entries: Seq[tuple[int, TokenLogprob]], tokenizer: Tokenizer, likeliest: int) -> dict[str, Any]:
    """As /v1/chat/completions has them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": _finite(logprob), "bytes": [*data]}

    return {
        "content": [
            entry(each.token_id, each.logprob) | {"top_logprobs": [entry(*one) for one in each.top[:likeliest]]}
            for _, each in entries
        ],
        "refusal": None,
    }


def logprobs_of_completion(
    entries: Seq[tuple[int, TokenLogprob]], tokenizer: Tokenizer, likeliest: int
) -> dict[str, Any]:
    """As /v1/completions has them: the tokens asked for and the one that was drawn."""
    tops = [dict(each.top[:likeliest]) | {each.token_id: each.logprob} for _, each in entries]
    return {
        "tokens": [tokenizer.token_text(each.token_id) for _, each in entries],
        "token_logprobs": [_finite(each.logprob) for _, each in entries],
        "top_logprobs": [{tokenizer.token_text(token): _finite(value) for token, value in top.items()} for top in tops]
        if likeliest
        else None,
        "text_offset": [offset for offset, _ in entries],
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's name for a token that cannot come is this number."""
    return max(logprob, -9999.0)
