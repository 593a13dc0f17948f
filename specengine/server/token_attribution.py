"""Attributes the streamed text to tokens: who proposed each token, and its log-probability."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from specengine.tokenizer import Tokenizer
from specengine.types import CycleTrace, GenerationOutput, StreamEvent, TokenLogprob


@dataclass
class Delta:
    """The addition of one event to a text.

    logprobs: (offset, token) of the tokens whose text begins in the text so far.
    tokens: (text, proposer) pairs; together they are `text`.  cycles: nodes, depth and accepted nodes of each tree.
    """

    index: int
    text: str
    logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    tokens: list[tuple[str, str]] = field(default_factory=list)
    cycles: list[dict[str, int]] = field(default_factory=list)
    output: GenerationOutput | None = None


class TokenAttribution:
    """Splits the text of one stream into the texts of its tokens.

    An event's text excludes incomplete characters and possible beginnings of a stop string. So the text of a token
    can come in a later event than the token, or never, if a stop string cuts it off. The same holds for its
    log-probability.
    prompt: token ids; the first space of a text depends on the end of the prompt.  drafter: the drafter's name.
    skip_special_tokens: as in the request's SamplingParams.  hidden: tokens that end a text, which have none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        drafter: str,
        skip_special_tokens: bool = True,
        hidden: Collection[int] = (),
    ) -> None:
        self._drafter = drafter
        self._last_proposer = drafter
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens, hidden)
        self._detokenizer.feed(prompt[-4:])
        self._num_sent = 0  # characters in all events so far
        self._num_decoded = 0  # characters of all tokens so far
        self._unsent: deque[tuple[str, str]] = deque()  # (text, proposer)
        self._unsent_logprobs: deque[tuple[int, TokenLogprob]] = deque()

    def add(self, event: StreamEvent) -> Delta:
        """Takes the next event and returns its addition."""
        if event.trace is not None or event.logprobs is not None:
            self._decode(event)
        self._num_sent += len(event.text)
        delta = Delta(event.index, event.text, output=event.output)
        while self._unsent_logprobs and self._unsent_logprobs[0][0] < self._num_sent:
            delta.logprobs.append(self._unsent_logprobs.popleft())
        if event.trace is not None:
            delta.tokens = [*self._split(event.text)]
            delta.cycles = [_summarise_tree(cycle) for cycle in event.trace]
        return delta

    def _decode(self, event: StreamEvent) -> None:
        """Queues the texts and log-probabilities of the event's tokens."""
        proposers = [name for cycle in event.trace or () for name in proposers_of(cycle, self._drafter)]
        for number, token in enumerate(event.token_ids):
            text = self._detokenizer.feed([token])
            if event.trace is not None:
                self._unsent.append((text, proposers[number]))
            if event.logprobs is not None:
                self._unsent_logprobs.append((self._num_decoded, event.logprobs[number]))
            self._num_decoded += len(text)

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        """Yields the tokens' parts of a text with their proposers."""
        while self._unsent and (text or not self._unsent[0][0]):
            part, self._last_proposer = self._unsent.popleft()
            if len(part) > len(text):
                self._unsent.appendleft((part[len(text) :], self._last_proposer))
                part = text
            text = text[len(part) :]
            if part:
                yield part, self._last_proposer
        if text:  # U+FFFD for a character that stayed incomplete
            yield text, self._last_proposer


def proposers_of(cycle: CycleTrace, drafter: str) -> list[str]:
    """Returns who proposed each token of a cycle.

    An accepted node has the name of the drafter, or of the parts of a combination. The last token is `bonus` after a
    drafted path, and `root` if nothing was drafted.
    """
    sources = cycle.sources or ((drafter,),) * len(cycle.accepted)
    proposers = ["+".join(names) or drafter for names in sources]
    if cycle.bonus is not None:
        proposers.append("bonus" if len(cycle.tokens) > 1 else "root")
    return proposers


def _summarise_tree(cycle: CycleTrace) -> dict[str, int]:
    depths = [0] * len(cycle.parents)
    for node, parent in enumerate(cycle.parents[1:], start=1):
        depths[node] = depths[parent] + 1
    return {"nodes": len(cycle.tokens), "depth": max(depths), "accepted": len(cycle.accepted)}
