"""Decides in every cycle what is drafted and verified: whatever takes time must bring tokens worth that time.

The price of a second is the batch's recent tokens per second; seconds are those of the machine's usual speed. A long
run is fastest if every source, level and node is taken whose expected tokens exceed the price of its seconds (the
renewal-reward theorem). All decisions fall before the target's pass, in drafting order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol, runtime_checkable

from specengine.draft_policy.cost_model import USUAL, Curve, CycleCosts, followed
from specengine.draft_policy.draft import Draft, Step
from specengine.draft_trees.cut import cut_trees, expected_tokens
from specengine.draft_trees.join import join_trees
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree

PLAIN = 100  # one cycle of this many is plain: the price of all others is measured by it
EXPLORED = 0.01  # of the time, at most, is lost to drafts that are expected not to pay
FIRST, MEMORY = 4, 32  # drafts before a source's mean gain counts, and drafts that the mean remembers
TOGETHER = 0.9  # of its tokens, what a draft for a batch is worth: its requests do not end together
CYCLES = 16  # that the price remembers; and those in a row in which nothing is asked, where nothing pays


@runtime_checkable
class Source(Protocol):
    """Proposes trees whose nodes have chances, by which they are cut, and `combine` merges them with others."""

    def propose(self, requests: Sequence[Any], min_gain: float) -> list[ScoredTree]:
        """Returns a tree per request, with the learned chance of each node.

        min_gain: what one more level must be expected to add, the sum over the requests; 0: draft all levels.
        """
        ...

    def skip(self, requests: Sequence[Any]) -> None:
        """Notes, in place of propose(), that this cycle drafts nothing for these requests."""
        ...

    def ready(self, requests: Sequence[Any]) -> int:
        """Returns for how many of these requests it can draft; by default for all."""
        return len(requests)

    def drafted_levels(self, trees: Sequence[ScoredTree]) -> int:
        """Returns how many levels the last propose() drafted, which took its time; `trees` is what it returned.

        By default the deepest tree's levels: a drafter that leaves out its deepest nodes counts them here.
        """
        return max((tree.levels for tree in trees), default=0)

    @property
    def learned(self) -> list[list[float]]:
        """Lists of fixed length with all that it has learned of chances. The next process fills them again."""
        return []


@dataclass
class Gain:
    """What recent drafts of a source added to the tree before it, per request, and what they took: means.

    rows: seconds of the nodes.  first, further: seconds of a draft's first level, and of each further one.
    """

    tokens: float = 0.0
    nodes: float = 0.0
    rows: float = 0.0
    levels: float = 0.0
    uses: float = 0.0
    first: float = 0.0
    further: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of a draft."""
        return self.first + self.further * max(0.0, self.levels - 1)

    def record(self, tokens: float, nodes: float, rows: float, levels: int, seconds: float) -> None:
        """Records one draft."""
        self.uses = min(self.uses + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self.uses
        self.nodes += (nodes - self.nodes) / self.uses
        self.rows += (rows - self.rows) / self.uses
        self.levels += (levels - self.levels) / self.uses
        more = max(0, levels - 1)
        if not self.first:
            self.first = self.further = seconds / max(1, levels)
        expected = self.first + self.further * more
        change = followed(expected, seconds, max(USUAL, 1 / self.uses)) - expected
        self.first = max(0.0, self.first + change / (1 + more * more))  # the least change of both that explains it
        self.further = max(0.0, self.further + change * more / (1 + more * more))


class DraftPolicy:
    """Chooses among sources, the cheapest first, and cuts their joint tree.

    most: nodes of a tree, root excluded.  adaptive: otherwise every source drafts, and the likeliest nodes stay.
    costs: of cycles; None: learned from nothing.  save: is called rarer and rarer, to keep what was learned.
    gains: by source and batch size (bits).
    """

    def __init__(
        self,
        sources: Sequence[Source],
        most: int,
        *,
        adaptive: bool = True,
        costs: CycleCosts | None = None,
        save: Callable[[DraftPolicy], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.sources, self.costs = sources, costs or CycleCosts()
        self.gains: dict[tuple[int, int], Gain] = {}
        self._most, self._adaptive, self._clock, self._save = most, adaptive, clock, save
        self._rates: dict[int, tuple[float, float]] = {}  # recent tokens and seconds of a cycle, by batch size
        self._left = [0.0] * max(1, len(sources))  # seconds that each source may lose
        self._losses = [0.0] * len(self._left)  # that each source was last expected to make
        self._reading = [0.0] * len(self._left)  # seconds in which each source reads a token of a prompt
        self._rest = (0, 0, 0.0)  # batch size, its cycles to come in which nothing is asked, and their usual seconds
        self._cycles = 0

    def draft(self, requests: Sequence[Any]) -> Draft:
        """Returns the draft of a cycle."""
        if not requests:
            return Draft(requests, [])
        draft, plain = self._begin(requests)
        whole, price = list[ScoredTree](), self._price(len(requests), draft.seconds)
        for number, source in enumerate(self.sources):
            ready = 0 if plain else source.ready(requests)
            if plain or not self._pays(number, ready, draft, price):
                source.skip(requests)
                continue
            began, gain = self._clock(), self._gain(number, len(requests))
            row = draft.seconds.level(draft.nodes + ready, ready)
            # A level takes its part of the draft, and a row of every request.
            more = source.propose(requests, price * (gain.further + row))
            pairs = zip(whole, more, strict=True) if whole else ()
            whole = [join_trees(one, other, pooled=True) for one, other in pairs] or more
            trees = cut_trees(whole, price, draft.seconds, self._most)
            levels, seconds = source.drafted_levels(more), self._clock() - began
            # All of a mixture's levels may pay or none: the luck of some drafts must not decide. Chances joined of two
            # sources are not calibrated.
            expected = expected_tokens(whole, trees) if draft.seconds.mixture and not draft.steps else None
            draft.add(Step(number, ready, more, levels, trees, seconds, expected))
        if not plain and not draft.steps:
            self._begin_rest(draft)
        return draft

    def draft_whole(self, requests: Sequence[Any], grow: Callable[[bool], list[DraftTree]]) -> Draft:
        """Returns the draft of a drafter that drafts all or nothing. grow(drafts): makes them; otherwise roots."""
        if not requests:
            return Draft(requests, [])
        began, ready = self._clock(), len(requests)
        draft, plain = self._begin(requests)
        draft.trees = grow(drafts := not plain and self._pays(0, ready, draft, self._price(ready, draft.seconds)))
        if drafts:
            draft.add(Step(0, ready, [], 1, draft.trees, self._clock() - began))
        elif not plain:
            self._begin_rest(draft)
        return draft

    def reads(self, number: int, tokens: int, answer: int, batch: int) -> bool:
        """Returns whether a source is to read the prompt of a new request.

        tokens: of the prompt.  answer: of the answer, at most.  batch: size of the request's batch. A source reads
        where its drafts in the answer save more than that takes. Elsewhere it reads now and then, to explore drafts.
        """
        gain, curve = self._gain(number, batch), self.costs.curve(batch, tokens)
        if not self._adaptive or gain.uses < FIRST:
            return True
        reading, plain = tokens * self._reading[number], batch / curve(0)  # the price in a text yet unknown
        saved = -self._loss(gain, batch, 0, curve, plain) / batch * answer / (1 + max(0.0, gain.tokens))
        least = reading + max(0.0, self._loss(gain, 1, 0, curve, plain))
        if reads := saved > reading or self._affords(number, reading, least):
            self._rest = (0, 0, 0.0)  # of requests that no source read
        return reads

    def charge(self, number: int, tokens: int, seconds: float) -> None:
        """Learns what a source takes to read some tokens of a prompt."""
        usual = seconds / tokens / (self.costs.speed or 1.0)
        self._reading[number] = followed(self._reading[number] or usual, usual)

    def observe(self, draft: Draft, committed: Sequence[Sequence[int]]) -> None:
        """Learns from the committed tokens of a cycle, at its end.

        draft: as the policy made it, or with other trees, which were verified.
        """
        count = len(draft.requests)
        if not self._adaptive or draft.began is None:
            self._pass_rest(count)
            return
        seconds, drafting = self._clock() - draft.began, sum(step.seconds for step in draft.steps)
        speed = self.costs.observe(draft.seconds, draft.prefix, draft.nodes, seconds - drafting, draft.experts)
        accepted, nodes, tokens = 0, 0, float(sum(map(len, committed)))  # of the steps before; of the cycle, less luck
        for number, ready, _, levels, trees, took, expected in draft.steps:
            now = sum(tree.accepted(text) for tree, text in zip(trees, committed, strict=True))
            size = sum(len(tree.tokens) - 1 for tree in trees)
            gained = now - accepted if expected is None else expected
            tokens += gained - (now - accepted)
            rows = draft.seconds(size) - draft.seconds(nodes)
            gain = self._gain(number, count)
            gain.record(gained / ready, (size - nodes) / ready, rows / ready, levels, took / speed)
            accepted, nodes = now, size
        seconds /= speed
        usual = self._rates.get(count.bit_length(), (count, draft.seconds(0)))
        mean = (usual[0] + (tokens - usual[0]) / CYCLES, usual[1] + (seconds - usual[1]) / CYCLES)
        self._rates[count.bit_length()] = mean
        self._earn(seconds)
        self._cycles += 1
        if self._save and self._cycles >= CYCLES and self._cycles.bit_count() == 1:
            self._save(self)

    def _begin(self, requests: Sequence[Any]) -> tuple[Draft, bool]:
        """Returns the draft of a cycle, and whether nothing is asked: it rests, or is measured as a plain cycle."""
        draft = Draft(requests, [DraftTree(request.tokens[-1:], [-1]) for request in requests])
        size, cycles, _ = self._rest
        if cycles and size == len(requests):
            draft.rest = cycles - 1
            return draft, True
        draft.began = self._clock()
        draft.prefix = sum(len(request.tokens) for request in requests) / len(requests)
        draft.seconds = self.costs.curve(len(requests), draft.prefix)
        return draft, self._adaptive and self._cycles % PLAIN == PLAIN - 1

    def _begin_rest(self, draft: Draft) -> None:
        """Begins a rest, as no source drafts: until the first one may be explored, nothing is computed."""
        size, seconds = len(draft.requests), draft.seconds(0)
        waits = ((loss - left) / (EXPLORED * seconds) for loss, left in zip(self._losses, self._left, strict=True))
        draft.rest = max(0, int(min(CYCLES, *waits))) if self._adaptive else 0
        self._rest = (size, draft.rest, seconds)
        self._rates.pop(size.bit_length(), None)  # recent cycles were plain

    def _pass_rest(self, count: int) -> None:
        """Counts a cycle of a rest, whether or not a draft was asked for."""
        size, cycles, seconds = self._rest
        if cycles and size == count:
            self._rest = (size, cycles - 1, seconds)
            self._earn(seconds)

    def _earn(self, seconds: float) -> None:
        self._left = [left + EXPLORED * seconds for left in self._left]

    def _price(self, count: int, curve: Curve) -> float:
        """Returns the tokens that a second must bring: as many as recent cycles, plain cycles at least."""
        tokens, seconds = self._rates.get(count.bit_length(), (0.0, 1.0))
        return max(count / curve(0), tokens / seconds) if self._adaptive else 0.0

    def _pays(self, number: int, ready: int, draft: Draft, price: float) -> bool:
        """Returns whether a source is to draft: it pays, or its gain is unknown, or it is explored."""
        gain = self._gain(number, len(draft.requests))
        if not ready or not self._adaptive or gain.uses < FIRST:
            self._losses[number] = inf  # it waits for requests, not for what it may lose
            return ready > 0
        loss = self._losses[number] = self._loss(gain, ready, draft.nodes, draft.seconds, price)
        return loss <= 0 or self._affords(number, loss, loss, draft.seconds(0))

    def _loss(self, gain: Gain, ready: int, nodes: int, curve: Curve, price: float) -> float:
        """Returns the seconds that a draft is expected to lose. nodes: of the trees before it."""
        of_mean = curve(max(0, round(nodes + ready * gain.nodes))) - curve(nodes)
        rows = ready * gain.rows if curve.mixture else of_mean  # unequal drafts take less than their mean
        worth = 1.0 if curve.requests == 1 else TOGETHER
        return rows + gain.seconds - worth * ready * gain.tokens / price

    def _affords(self, number: int, cost: float, least: float, most: float = 0.0) -> bool:
        """Takes a cost from what a source may lose, once so much was saved at least; no more than `most` is kept."""
        left = self._left[number] = min(self._left[number], max(least, most))
        if affords := left >= least:
            self._left[number] -= cost
        return affords

    def _gain(self, number: int, batch: int) -> Gain:
        """Returns a source's gain at a batch size; what the nearest smaller size has taught is where it begins."""
        size = batch.bit_length()
        if (number, size) not in self.gains or not self.gains[number, size].uses:
            smaller = max((bits for source, bits in list(self.gains) if source == number and bits < size), default=0)
            gain = self.gains.get((number, smaller), Gain())
            self.gains[number, size] = replace(gain, uses=min(gain.uses, FIRST))  # its own outcomes count soon
        return self.gains[number, size]
