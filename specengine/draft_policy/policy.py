"""Decides in every cycle what is drafted and verified: whatever takes time must bring tokens worth that time.

The price of a second is the batch's recent tokens per second. A long run is fastest if every source, level and node is
taken whose expected tokens exceed the price of its seconds (the renewal-reward theorem). All decisions fall before the
target's pass, in drafting order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from specengine.draft_policy.acceptance import Agreement, JointTree
from specengine.draft_policy.cost_model import CycleCosts, DraftSeconds
from specengine.draft_policy.cut_trees import cut_trees
from specengine.draft_policy.memory import Memory
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer

EXPLORED = 0.01  # of the time, at most, is lost to drafts that are expected not to pay
FIRST, MEMORY = 4, 32  # drafts before a source's mean gain counts, and drafts that the mean remembers
CYCLES = 16  # that the price remembers
SAVED = 16  # cycles before the first save; each later one comes after four times as many


class Source(Protocol):
    """What proposes trees whose nodes have chances: a drafter, or a part of `combine`.

    learned: lists of fixed length with what it has learned of chances.
    """

    @property
    def learned(self) -> list[list[float]]: ...

    def propose(self, requests: Sequence[Any], least_tokens: float) -> list[ScoredTree]:
        """Returns a tree per request. least_tokens: what a further level is to add, the sum over the requests."""
        ...

    def skip(self, requests: Sequence[Any]) -> None:
        """Notes, in place of propose(), a cycle without a draft."""
        ...


@dataclass
class Gain:
    """What recent drafts of a source added to the tree before it, per request, and the seconds of a draft."""

    tokens: float = 0.0
    nodes: float = 0.0
    seconds: float = 0.0
    uses: float = 0.0

    def record(self, tokens: float, nodes: float, seconds: float) -> None:
        """Records one draft."""
        self.uses = min(self.uses + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self.uses
        self.nodes += (nodes - self.nodes) / self.uses
        self.seconds += (seconds - self.seconds) / self.uses


@dataclass(frozen=True)
class Step:
    """What a source did in a cycle. before, after: the trees without and with it.  nodes: that it added.

    seconds: that such a draft usually takes.
    """

    gain: Gain
    before: Sequence[DraftTree]
    after: Sequence[DraftTree]
    nodes: int
    seconds: float


@dataclass
class Draft:
    """The draft of a cycle. trees: cut to the nodes that pay.  nodes: of all trees, roots excluded.

    sources: the trees of every source that drafted.  joints: how they were joined.  drafting: seconds of all sources.
    """

    requests: Sequence[Any]
    began: float
    trees: list[DraftTree]
    nodes: int = 0
    sources: list[tuple[int, list[ScoredTree]]] = field(default_factory=list)
    joints: list[tuple[Agreement, list[JointTree]]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    drafting: float = 0.0

    @property
    def prefix(self) -> float:
        """Tokens in the cache, the mean of the requests."""
        return sum(len(request.tokens) for request in self.requests) / len(self.requests)


class DraftPolicy:
    """Chooses among sources, the cheapest first, and cuts their joint tree.

    most: nodes of a tree, root excluded.  adaptive: otherwise every source drafts, and the likeliest nodes stay.
    costs: of cycles; None: learned from nothing.  memory: where the next process finds what this one has learned.
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
        self._drafting: dict[tuple[int, int], DraftSeconds] = {}  # likewise
        self._rates: dict[int, tuple[float, float]] = {}  # recent tokens and seconds of a cycle, by batch size
        self._left = [0.0] * max(1, len(sources))  # seconds that each source may lose
        self._open: Draft | None = None
        self._memory, self._cycles = memory, 0
        if memory:
            self._load(memory.read())

    @staticmethod
    def of(
        drafter: Any,
        target: Transformer,
        adaptive: bool,
        costs: CycleCosts | None = None,
        parts: Sequence[Any] | None = None,
    ) -> DraftPolicy:
        """Makes the policy of a drafter.

        costs: given ones; None: learned, and remembered by the next process.  parts: the sources, where the drafter
        itself is none.
        """
        kinds = [f"{part.name} {part.config}" for part in (drafter, *(parts or ()))]
        memory = Memory(target, " + ".join(kinds)) if adaptive and costs is None else None
        sources = [drafter] if parts is None else parts
        return DraftPolicy(sources, drafter.max_nodes - 1, adaptive=adaptive, costs=costs, memory=memory)

    def draft(self, requests: Sequence[Any], views: Sequence[Sequence[Any]] | None = None) -> Draft:
        """Returns the draft of a cycle. views: the requests as each source sees them; None: as they are."""
        draft = self._begin(requests)
        price = self._price(draft)
        whole: list[ScoredTree] = []
        for number, source in enumerate(self._sources):
            own = requests if views is None else views[number]
            if not self._pays(number, draft, price):
                source.skip(own)
                continue
            began = self._clock()
            more = source.propose(own, price * self._level_seconds(number, draft))
            if any(len(tree.tokens) > 1 for tree in more):
                draft.sources.append((number, more))
                whole = self._joined(number, draft, whole, more)
                nodes = sum(len(tree.tokens) - 1 for tree in whole)
                trees = cut_trees(whole, price, self._costs.curve(len(requests), nodes, draft.prefix), self._most)
            else:
                trees = draft.trees
            self._step(number, draft, trees, max(map(_depth, more), default=0), began)
        return draft

    def draft_whole(self, requests: Sequence[Any], grow: Callable[[bool], list[DraftTree]]) -> list[DraftTree]:
        """Returns the trees of a drafter that drafts all or nothing. grow(drafts): makes them; otherwise roots."""
        if not requests:
            return grow(True)
        draft = self._begin(requests)
        if not self._pays(0, draft, self._price(draft)):
            return grow(False)
        began = self._clock()
        self._step(0, draft, grow(True), 1, began)
        return draft.trees

    def observe(self, requests: Sequence[Any], committed: Sequence[Sequence[int]]) -> None:
        """Learns from the committed tokens of a cycle, at its end."""
        draft, self._open = self._open, None  # at once: engines in other threads may share the drafter
        if draft is None or draft.requests[0] is not requests[0] or len(draft.requests) != len(requests):
            return
        for agreement, joints in draft.joints:
            for joint, tokens in zip(joints, committed, strict=True):
                agreement.observe(joint, tokens)
        if not self._adaptive:
            return
        count = len(requests)
        for step in draft.steps:
            pairs = zip(step.before, step.after, committed, strict=True)
            gained = sum(_accepted(after, tokens) - _accepted(before, tokens) for before, after, tokens in pairs)
            step.gain.record(gained / count, step.nodes / count, step.seconds)
        seconds = self._clock() - draft.began
        self._costs.observe(count, draft.nodes, draft.prefix, seconds - draft.drafting)
        now = (sum(map(len, committed)), seconds)
        before = self._rates.get(count.bit_length(), now)
        self._rates[count.bit_length()] = (
            before[0] + (now[0] - before[0]) / CYCLES,
            before[1] + (now[1] - before[1]) / CYCLES,
        )
        self._left = [left + EXPLORED * seconds for left in self._left]
        self._cycles += 1
        if self._memory and self._cycles >= SAVED and (self._cycles & (self._cycles - 1)) == 0:
            self._memory.write(self._learned())

    def _learned(self) -> dict[str, Any]:
        return {
            "costs": self._costs.state,
            "gains": [[*key, *astuple(gain)] for key, gain in self._gains.items()],
            "drafting": [[*key, *each] for key, own in self._drafting.items() for each in own.levels.items()],
            "chances": self._chances(),
        }

    def _load(self, learned: dict[str, Any]) -> None:
        """Takes up what another process has learned, as far as it fits."""
        with suppress(KeyError, TypeError, ValueError):
            self._costs.state = learned["costs"]
            for number, size, *numbers in learned["gains"]:
                self._gains[number, size] = Gain(*numbers)
            for number, size, levels, seconds in learned["drafting"]:
                self._drafting.setdefault((number, size), DraftSeconds()).levels[levels] = seconds
            for own, known in zip(self._chances(), learned["chances"], strict=True):
                own[:] = known if len(known) == len(own) else own

    def _chances(self) -> list[list[float]]:
        learners = (*self._agreements, *self._sources)
        return [numbers for learner in learners for numbers in learner.learned]

    def _begin(self, requests: Sequence[Any]) -> Draft:
        trees = [DraftTree(request.tokens[-1:], [-1]) for request in requests]
        self._open = Draft(requests, self._clock(), trees)
        return self._open

    def _price(self, draft: Draft) -> float:
        """Returns the tokens that a second must bring: as many as recent cycles, plain cycles at least."""
        if not self._adaptive:
            return 0.0
        count = len(draft.requests)
        plain = count / self._costs.curve(count, 0, draft.prefix)[0]
        tokens, seconds = self._rates.get(count.bit_length(), (0.0, 1.0))
        return max(plain, tokens / seconds)

    def _pays(self, number: int, draft: Draft, price: float) -> bool:
        """Returns whether a source is to draft: it pays, or its gain is unknown, or it is explored."""
        count = len(draft.requests)
        gain = self._gain(number, count)
        if not self._adaptive or gain.uses < FIRST:
            return True
        nodes = max(0, round(draft.nodes + count * gain.nodes))
        seconds = self._costs.curve(count, max(nodes, draft.nodes), draft.prefix)
        loss = seconds[nodes] - seconds[draft.nodes] + gain.seconds - count * gain.tokens / price
        if loss > 0:
            left = self._left[number] = min(self._left[number], max(loss, seconds[0]))
            if left < loss:
                return False
            self._left[number] -= loss
        return True

    def _gain(self, number: int, count: int) -> Gain:
        """Returns a source's gain at a batch size; what the nearest smaller size has taught is where it begins."""
        size = count.bit_length()
        if (number, size) not in self._gains:
            smaller = max((bits for source, bits in self._gains if source == number and bits < size), default=0)
            known = self._gains.get((number, smaller), Gain())
            longer = known.seconds * 2 ** (size - smaller)
            self._gains[number, size] = Gain(known.tokens, known.nodes, longer, min(known.uses, FIRST))
        return self._gains[number, size]

    def _level_seconds(self, number: int, draft: Draft) -> float:
        """Returns the seconds of one more level: its draft, and a row of every request."""
        count = len(draft.requests)
        seconds = self._costs.curve(count, draft.nodes + 2 * count, draft.prefix)
        rows = seconds[draft.nodes + 2 * count] - seconds[draft.nodes + count]
        return rows + self._seconds_of(number, count).of_one_level

    def _seconds_of(self, number: int, count: int) -> DraftSeconds:
        return self._drafting.setdefault((number, count.bit_length()), DraftSeconds())

    def _joined(
        self, number: int, draft: Draft, trees: Sequence[ScoredTree], more: list[ScoredTree]
    ) -> list[ScoredTree]:
        """Joins a source's trees to those of the sources before it."""
        if not trees:
            return more
        agreement = self._agreements[number]
        joints = [agreement.join(*pair) for pair in zip(trees, more, strict=True)]
        draft.joints.append((agreement, joints))
        return [joint.tree for joint in joints]

    def _step(self, number: int, draft: Draft, trees: list[DraftTree], levels: int, began: float) -> None:
        """Ends a source's draft."""
        nodes = sum(len(tree.tokens) - 1 for tree in trees)
        seconds = self._clock() - began
        count = len(draft.requests)
        usual = self._seconds_of(number, count).observe(levels, seconds)
        draft.steps.append(Step(self._gain(number, count), draft.trees, trees, nodes - draft.nodes, usual))
        draft.trees, draft.nodes = trees, nodes
        draft.drafting += seconds


def _depth(tree: ScoredTree) -> int:
    depths = [0]
    for parent in tree.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def _accepted(tree: DraftTree, committed: Sequence[int]) -> int:
    """Returns how many nodes of a tree the committed tokens run through."""
    children = {pair: node for node, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node = count = 0
    for token in committed:
        node = children.get((node, token), 0)
        if not node:
            break
        count += 1
    return count
