"""Decides in every cycle what is drafted and verified: whatever takes time must bring tokens worth that time.

The price of a second is the batch's recent tokens per second; seconds are those of the machine's usual speed. A long
run is fastest if every source, level and node is taken whose expected tokens exceed the price of its seconds (the
renewal-reward theorem). All decisions fall before the target's pass, in drafting order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from math import isfinite
from typing import Any, Protocol

from specengine.draft_policy.acceptance import Agreement
from specengine.draft_policy.cost_model import Curve, CycleCosts, followed
from specengine.draft_trees.cut import cut_trees
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree

PLAIN = 100  # one cycle of this many is plain: the price of all others is measured by it
EXPLORED = 0.01  # of the time, at most, is lost to drafts that are expected not to pay
FIRST, MEMORY = 4, 32  # drafts before a source's mean gain counts, and drafts that the mean remembers
ENGINES = 8  # whose cycles may be under way at once
CYCLES = 16  # that the price remembers; and the most in a row in which nothing is asked, where nothing pays


class Source(Protocol):
    """What proposes trees whose nodes have chances; see drafters.capabilities.ScoredDrafter."""

    @property
    def learned(self) -> list[list[float]]: ...

    def propose(self, requests: Sequence[Any], least_tokens: float) -> list[ScoredTree]: ...

    def skip(self, requests: Sequence[Any]) -> None: ...


class Memory(Protocol):
    """Keeps what a policy has learned for the next process, as plain JSON values."""

    def read(self) -> dict[str, Any]: ...

    def write(self, learned: dict[str, Any]) -> None: ...


@dataclass
class Gain:
    """What recent drafts of a source added to the tree before it, per request, and what they took.

    first, further: seconds of a draft's first level, and of each further one.
    """

    tokens: float = 0.0
    nodes: float = 0.0
    levels: float = 0.0
    uses: float = 0.0
    first: float = 0.0
    further: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of a draft."""
        return self.first + self.further * max(0.0, self.levels - 1)

    def record(self, tokens: float, nodes: float, levels: int, seconds: float) -> None:
        """Records one draft."""
        self.uses = min(self.uses + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self.uses
        self.nodes += (nodes - self.nodes) / self.uses
        self.levels += (levels - self.levels) / self.uses
        more = max(0, levels - 1)
        if not self.first:
            self.first = self.further = seconds / max(1, levels)
        expected = self.first + self.further * more
        change = followed(expected, seconds) - expected
        self.first = max(0.0, self.first + change / (1 + more * more))  # the least change of both that explains it
        self.further = max(0.0, self.further + change * more / (1 + more * more))


@dataclass(frozen=True)
class Step:
    """What a source did in a cycle. before, after: the trees without and with it."""

    gain: Gain
    before: Sequence[DraftTree]
    after: Sequence[DraftTree]
    levels: int
    seconds: float


@dataclass
class Draft:
    """The draft of a cycle. trees: cut to the nodes that pay.  nodes: of all trees, roots excluded.

    prefix: tokens in the cache, the mean of the requests.  seconds: of the cycle without its drafting, by its nodes.
    sources: the numbers and trees of the sources that drafted.  joints: arguments of Agreement.observe.
    """

    requests: Sequence[Any]
    began: float
    trees: list[DraftTree]
    prefix: float
    seconds: Curve
    nodes: int = 0
    sources: list[tuple[int, list[ScoredTree]]] = field(default_factory=list)
    joints: list[tuple[Agreement, list[tuple[ScoredTree, list[tuple[int, float]]]]]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class DraftPolicy:
    """Chooses among sources, the cheapest first, and cuts their joint tree.

    most: nodes of a tree, root excluded.  adaptive: otherwise every source drafts, and the likeliest nodes stay.
    costs: of cycles; None: learned from nothing.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        most: int,
        *,
        adaptive: bool = True,
        costs: CycleCosts | None = None,
        memory: Memory | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sources, self._most, self._adaptive, self._clock = sources, most, adaptive, clock
        self._costs = costs or CycleCosts()
        self._agreements = [Agreement() for _ in sources]  # of a source with the sources before it
        self._gains: dict[tuple[int, int], Gain] = {}  # by source and batch size
        self._rates: dict[int, tuple[float, float]] = {}  # recent tokens and seconds of a cycle, by batch size
        self._left = [0.0] * max(1, len(sources))  # seconds that each source may lose
        self._losses = [0.0] * max(1, len(sources))  # that each source is expected to make
        self._open: dict[int, Draft] = {}  # not observed yet, by the first request: engines may share a drafter
        self._resting = {"requests": 0, "cycles": 0.0, "earned": 0.0}
        self._memory, self._cycles = memory, 0
        if memory:
            self._load(memory.read())

    def draft(self, requests: Sequence[Any], views: Sequence[Sequence[Any]] | None = None) -> Draft:
        """Returns the draft of a cycle. views: the requests as each source sees them; None: as they are."""
        draft = self._begin(requests)
        resting = self._rests(draft) or self._is_plain()
        price = 0.0 if resting else self._price(draft)
        whole: list[ScoredTree] = []
        for number, source in enumerate(self._sources):
            own = requests if views is None else views[number]
            if resting or not self._pays(number, draft, price):
                source.skip(own)
                continue
            began = self._clock()
            more = source.propose(own, price * self._level_seconds(number, draft))
            trees, levels = draft.trees, max(tree.levels for tree in more)
            if levels:
                draft.sources.append((number, more))
                whole = self._joined(number, draft, whole, more)
                trees = cut_trees(whole, price, draft.seconds, self._most)
            self._step(number, draft, trees, levels, began)
        if not resting:
            self._rest(draft)
        return draft

    def draft_whole(self, requests: Sequence[Any], grow: Callable[[bool], list[DraftTree]]) -> list[DraftTree]:
        """Returns the trees of a drafter that drafts all or nothing. grow(drafts): makes them; otherwise roots."""
        if not requests:
            return []
        draft = self._begin(requests)
        if self._rests(draft) or self._is_plain():
            return grow(False)
        if not self._pays(0, draft, self._price(draft)):
            self._rest(draft)
            return grow(False)
        began = self._clock()
        self._step(0, draft, grow(True), 1, began)
        return draft.trees

    def reads(self, number: int, batch: int) -> bool:
        """Returns whether source `number` is to read a request that begins in a batch of this size."""
        return True

    def charge(self, number: int, seconds: float) -> None:
        """Counts what reading took against what exploration may lose."""

    def _is_plain(self) -> bool:
        return self._adaptive and self._cycles % PLAIN == PLAIN - 1

    def _rests(self, draft: Draft) -> bool:
        """Counts a cycle of a rest; returns whether it is one."""
        rest = self._resting
        rest["cycles"] = rest["cycles"] - 1 if rest["requests"] == len(draft.requests) else 0
        if rest["cycles"] <= 0:
            return False
        self._open.pop(id(draft.requests[0]), None)
        self._left = [left + rest["earned"] for left in self._left]
        return True

    def _rest(self, draft: Draft) -> None:
        """Begins a rest where no source drafts: until the cheapest one may be explored, nothing is computed."""
        if draft.steps:
            return
        earned = EXPLORED * draft.seconds(0)
        cycles = min([CYCLES, *((self._losses[number] - left) // earned for number, left in enumerate(self._left))])
        self._resting = {"requests": len(draft.requests), "cycles": cycles, "earned": earned}

    def observe(self, requests: Sequence[Any], committed: Sequence[Sequence[int]]) -> None:
        """Learns from the committed tokens of a cycle, at its end."""
        draft = self._open.pop(id(requests[0]), None) if requests else None
        if draft is None or len(draft.requests) != len(requests) or draft.requests[0] is not requests[0]:
            return
        for agreement, joints in draft.joints:
            for joint, text in zip(joints, committed, strict=True):
                agreement.observe(*joint, text)
        if not self._adaptive:
            return
        count, nodes, drafting = len(requests), 0, sum(step.seconds for step in draft.steps)
        seconds = self._clock() - draft.began
        speed = self._costs.observe(draft.seconds, draft.prefix, draft.nodes, seconds - drafting)
        for step in draft.steps:
            pairs = zip(step.before, step.after, committed, strict=True)
            gained = sum(after.accepted(text) - before.accepted(text) for before, after, text in pairs)
            added = sum(len(tree.tokens) - 1 for tree in step.after) - nodes
            step.gain.record(gained / count, added / count, step.levels, step.seconds / speed)
            nodes += added
        seconds /= speed
        tokens = sum(len(own) for own in committed)
        usual = self._rates.get(count.bit_length(), (float(tokens), seconds))
        self._rates[count.bit_length()] = (
            usual[0] + (tokens - usual[0]) / CYCLES,
            usual[1] + (seconds - usual[1]) / CYCLES,
        )
        self._left = [left + EXPLORED * seconds for left in self._left]
        self._cycles += 1
        if self._memory and self._cycles >= CYCLES and self._cycles.bit_count() == 1:  # rarer and rarer
            self._memory.write(self._learned())

    def _begin(self, requests: Sequence[Any]) -> Draft:
        trees = [DraftTree(request.tokens[-1:], [-1]) for request in requests]
        prefix = sum(len(request.tokens) for request in requests) / len(requests)
        draft = Draft(requests, self._clock(), trees, prefix, self._costs.curve(len(requests), prefix))
        if len(self._open) >= ENGINES:  # of cycles that failed
            self._open.clear()
        self._open[id(requests[0])] = draft
        return draft

    def _price(self, draft: Draft) -> float:
        """Returns the tokens that a second must bring: as many as recent cycles, plain cycles at least."""
        if not self._adaptive:
            return 0.0
        count = len(draft.requests)
        tokens, seconds = self._rates.get(count.bit_length(), (0.0, 1.0))
        return max(count / draft.seconds(0), tokens / seconds)

    def _pays(self, number: int, draft: Draft, price: float) -> bool:
        """Returns whether a source is to draft: it pays, or its gain is unknown, or it is explored."""
        count = len(draft.requests)
        gain = self._gain(number, count)
        if not self._adaptive or gain.uses < FIRST:
            return True
        nodes = max(0, round(draft.nodes + count * gain.nodes))
        loss = draft.seconds(nodes) - draft.seconds(draft.nodes) + gain.seconds - count * gain.tokens / price
        self._losses[number] = loss
        if loss > 0:
            self._left[number] = min(self._left[number], max(loss, draft.seconds(0)))
            if self._left[number] < loss:
                return False
            self._left[number] -= loss
        return True

    def _gain(self, number: int, count: int) -> Gain:
        """Returns a source's gain at a batch size; what the nearest smaller size has taught is where it begins."""
        size = count.bit_length()
        if (number, size) not in self._gains:
            smaller = max((bits for source, bits in list(self._gains) if source == number and bits < size), default=0)
            known = self._gains.get((number, smaller), Gain())
            larger = 2 ** (size - smaller)
            self._gains[number, size] = replace(
                known, uses=min(known.uses, FIRST), first=known.first * larger, further=known.further * larger
            )
        return self._gains[number, size]

    def _level_seconds(self, number: int, draft: Draft) -> float:
        """Returns the seconds of one more level: its draft, and a row of every request."""
        count = len(draft.requests)
        rows = draft.seconds(draft.nodes + 2 * count) - draft.seconds(draft.nodes + count)
        return rows + self._gain(number, count).further

    def _joined(
        self, number: int, draft: Draft, trees: Sequence[ScoredTree], more: list[ScoredTree]
    ) -> list[ScoredTree]:
        """Joins a source's trees to those of the sources before it."""
        if not trees:
            return more
        agreement = self._agreements[number]
        joints = [agreement.join(*pair) for pair in zip(trees, more, strict=True)]
        draft.joints.append((agreement, joints))
        return [tree for tree, _ in joints]

    def _step(self, number: int, draft: Draft, trees: list[DraftTree], levels: int, began: float) -> None:
        """Ends a source's draft."""
        gain = self._gain(number, len(draft.requests))
        draft.steps.append(Step(gain, draft.trees, trees, levels, self._clock() - began))
        draft.trees, draft.nodes = trees, sum(len(tree.tokens) - 1 for tree in trees)

    def _chances(self) -> list[list[float]]:
        learners: list[Agreement | Source] = [*self._agreements, *self._sources]
        return [numbers for learner in learners for numbers in learner.learned]

    def _learned(self) -> dict[str, Any]:
        costs = [[*place, list(points.items())] for place, points in self._costs.known.items()]
        gains = [[*key, *astuple(gain)] for key, gain in self._gains.items()]
        return {"costs": costs, "gains": gains, "chances": self._chances()}

    def _load(self, learned: dict[str, Any]) -> None:
        """Takes up what another process has learned, as far as it fits."""
        with suppress(KeyError, TypeError, ValueError):
            costs = {(size, prefix): {n: float(s) for n, s in points} for size, prefix, points in learned["costs"]}
            gains = {(number, size): Gain(*map(float, numbers)) for number, size, *numbers in learned["gains"]}
            chances = [[float(x) for x in numbers] for numbers in learned["chances"]]
            seconds = [s for points in costs.values() for s in points.values()]
            places = [*gains, *costs, *((n, 0) for points in costs.values() for n in points)]
            numbers = [x for gain in gains.values() for x in astuple(gain)]
            if not all(isinstance(n, int) for place in places for n in place) or min(seconds, default=1.0) <= 0:
                return
            if not all(map(isfinite, (*seconds, *numbers, *(x for own in chances for x in own)))):
                return
            self._costs.known, self._gains = costs, gains
            for own, known in zip(self._chances(), chances, strict=True):
                own[:] = known if len(known) == len(own) else own
