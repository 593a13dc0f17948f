"""Replays recorded drafts without clocks: what a policy, or a fixed plan, takes for texts whose every draft is known.

drafts.json.gz (bench/record_drafts.py) has, for every position of a text, what eagle3 and suffix would draft there. So
any choice of drafts can be followed exactly: the text decides what is accepted, and a table of costs what it takes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from specengine.draft_policy.acceptance import Calibration
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.policy import DraftPolicy
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.policy_file import learned_of, teach

SOURCES = {"suffix": 1, "eagle3": 0}  # columns of the file, the cheaper source first
ROWS = {1: 3.0e-3, 2: 3.15e-3, 4: 3.3e-3, 8: 3.6e-3, 16: 6.2e-3, 32: 11.5e-3, 256: 90e-3}  # seconds of a cycle
DRAFTS = {"suffix": (0.2e-3, 0.0), "eagle3": (0.45e-3, 0.12e-3)}  # seconds of the first and of each further level
PROMPT = 60  # tokens before a text


@dataclass(frozen=True)
class Machine:
    """What things take. rows, drafts: as ROWS, DRAFTS.  slowness: factor on all of it, by the time.

    jitter: mean of the exponential noise on a cycle, as a share.  experts: that a layer reads, by rows; None: it has
    none.
    """

    rows: dict[int, float] = field(default_factory=lambda: ROWS)
    drafts: dict[str, tuple[float, float]] = field(default_factory=lambda: DRAFTS)
    slowness: Callable[[float], float] = lambda seconds: 1.0
    jitter: float = 0.05
    experts: Callable[[int], float] | None = None


@dataclass
class Text:
    """One recorded text. drafts: of every position, by source."""

    tokens: list[int]
    drafts: list[dict[str, ScoredTree]]
    kind: str = ""

    def cut(self, tokens: int) -> Text:
        """Returns its first tokens."""
        return Text(self.tokens[:tokens], self.drafts[:tokens], self.kind)


def seconds_of(points: dict[int, float], rows: int) -> float:
    """Returns the seconds of a cycle on the line through the neighbours of its rows."""
    return float(np.interp(rows, [*points], [*points.values()]))


class Clock:
    """Stands still until told to go on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Request:
    """A text under way."""

    def __init__(self, text: Text) -> None:
        self.text, self.place = text, 0
        self.tokens = [0] * PROMPT

    def commit(self, tokens: Sequence[int]) -> None:
        self.place += len(tokens)
        self.tokens += tokens

    def draft(self, source: str) -> ScoredTree:
        """Returns what the source would draft here."""
        room = len(self.text.tokens) - self.place - 1
        return self.text.drafts[self.place][source].rooted(self.tokens[-1], room)

    @property
    def ahead(self) -> list[int]:
        return self.text.tokens[self.place :]


class Recorded:
    """A source of the policy that drafts what was recorded. Levels end as draft_tree ends them."""

    def __init__(self, name: str, clock: Clock, machine: Machine) -> None:
        self.name, self._clock, self._machine = name, clock, machine
        self._calibration = Calibration() if name == "eagle3" else None
        self._last: dict[int, ScoredTree] = {}

    @property
    def learned(self) -> list[list[float]]:
        return self._calibration.learned if self._calibration else []

    def ready(self, requests: Sequence[Request]) -> int:
        return len(requests)

    def drafted_levels(self, trees: Sequence[ScoredTree]) -> int:
        return max(tree.levels for tree in trees)

    def propose(self, requests: Sequence[Request], min_gain: float) -> list[ScoredTree]:
        trees = [request.draft(self.name) for request in requests]
        levels = self.levels(trees, min_gain)
        first, further = self._machine.drafts[self.name]
        spent = first * (len(requests) if self.name == "suffix" else 1) + further * max(0, levels - 1)
        self._clock.seconds += spent * self._machine.slowness(self._clock.seconds)
        if self._calibration is None:
            return trees
        trees = [tree.rooted(tree.tokens[0], levels) for tree in trees]
        self._last = {id(request): tree for request, tree in zip(requests, trees, strict=True)}
        own = self._calibration
        return [ScoredTree(t.tokens, t.parents, [1.0, *own(t.chances[1:])]) for t in trees]

    def levels(self, trees: Sequence[ScoredTree], min_gain: float) -> int:
        """Returns the levels drafted: the next one is expected to be as likely as those above it."""
        deepest = max(tree.levels for tree in trees)
        if self.name == "suffix":
            return deepest
        depth, ends = 1, [_likeliest(tree, 0) for tree in trees]
        reached = [tree.chances[end] if end else 0.0 for tree, end in zip(trees, ends, strict=True)]
        while depth < deepest and sum(chance ** (1 + 1 / depth) for chance in reached) >= min_gain:
            depth += 1
            ends = [_likeliest(tree, end) if end else 0 for tree, end in zip(trees, ends, strict=True)]
            chances = (tree.chances[end] if end else 0.0 for tree, end in zip(trees, ends, strict=True))
            reached = [chance * own for chance, own in zip(reached, chances, strict=True)]
        return depth

    def skip(self, requests: Sequence[Request]) -> None:
        self._last = {}

    def observe(self, request: Request, committed: Sequence[int]) -> None:
        if self._calibration and id(request) in self._last:
            self._calibration.observe(self._last.pop(id(request)), committed)


def _likeliest(tree: ScoredTree, parent: int) -> int:
    children = [node for node in range(1, len(tree.parents)) if tree.parents[node] == parent]
    return max(children, key=lambda node: tree.chances[node], default=0)


@dataclass
class Plan:
    """Drafts of a fixed size in every cycle.

    source: None: none.  levels, width: of eagle3, which drafts `deepest` at most.  nodes: of suffix.
    """

    source: str | None = None
    levels: int = 32
    width: int = 3
    nodes: int = 63
    deepest: int = 5

    def __call__(self, requests: Sequence[Request], clock: Clock, machine: Machine) -> list[ScoredTree]:
        if self.source is None:
            return [ScoredTree.root(request.tokens[-1]) for request in requests]
        trees = [self._cut(request.draft(self.source)) for request in requests]
        first, further = machine.drafts[self.source]
        levels = min(self.levels, self.deepest) if self.source == "eagle3" else 1
        spent = first * (len(requests) if self.source == "suffix" else 1) + further * (levels - 1)
        clock.seconds += spent * machine.slowness(clock.seconds)
        return trees

    def _cut(self, tree: ScoredTree) -> ScoredTree:
        tree = tree.rooted(tree.tokens[0], self.levels)
        seen: dict[int, int] = {}
        kept: list[int] = []
        for node in range(1, len(tree.tokens)):
            parent = tree.parents[node]
            seen[parent] = seen.get(parent, 0) + 1
            if seen[parent] <= self.width and (parent == 0 or parent in kept) and len(kept) < self.nodes:
                kept.append(node)
        return tree.part(kept)


PLANS = [
    Plan(),
    *(Plan("eagle3", levels, width) for levels in range(1, 6) for width in (1, 2, 3)),
    *(Plan("suffix", nodes=nodes) for nodes in (1, 3, 5, 7, 11, 15)),
]


def load(path: Path = Path(__file__).parent / "drafts.json.gz") -> list[Text]:
    """Reads the recorded texts."""

    def tree(column: list[Any]) -> ScoredTree:
        tokens, parents, chances = column
        return ScoredTree([0, *tokens], [-1, *parents], [1.0, *chances])

    return [
        Text(
            text["tokens"],
            [{name: tree(row[column]) for name, column in SOURCES.items()} for row in text["drafts"]],
            text["category"],
        )
        for text in json.loads(gzip.decompress(path.read_bytes()))
    ]


def run(
    texts: Sequence[Text],
    draft: Callable[[Sequence[Request]], Sequence[Any]],
    clock: Clock,
    machine: Machine,
    batch: int = 1,
    observe: Callable[[Sequence[Request], list[list[int]]], None] = lambda requests, committed: None,
) -> float:
    """Follows the drafts through the texts, `batch` at a time; returns the seconds.

    observe: sees what every cycle commits.
    """
    noise, began = Random(0), clock.seconds
    for first in range(0, len(texts), batch):
        live = [Request(text) for text in texts[first : first + batch]]
        while live:
            trees = draft(live)
            rows = sum(len(tree.tokens) for tree in trees)
            factor = machine.slowness(clock.seconds) * (1 + machine.jitter * noise.expovariate(1))
            clock.seconds += factor * seconds_of(machine.rows, rows)
            committed = [
                request.ahead[: 1 + accepted(tree, request.ahead)] for request, tree in zip(live, trees, strict=True)
            ]
            for request, tokens in zip(live, committed, strict=True):
                request.commit(tokens)
            observe(live, committed)
            live = [request for request in live if request.ahead]
    return clock.seconds - began


def accepted(tree: Any, text: Sequence[int]) -> int:
    """Returns how many nodes of a tree the text runs through."""
    node = count = 0
    for token in text:
        pairs = zip(tree.parents[1:], tree.tokens[1:], strict=True)
        node = next((i for i, pair in enumerate(pairs, start=1) if pair == (node, token)), 0)
        if not node:
            break
        count += 1
    return count


def fixed(texts: Sequence[Text], plan: Plan, machine: Machine = Machine(), batch: int = 1) -> float:
    """Returns the seconds of a fixed plan."""
    clock = Clock()
    return run(texts, lambda live: plan(live, clock, machine), clock, machine, batch)


class Remembered:
    """A policy's file, in memory."""

    def __init__(self) -> None:
        self.learned: dict[str, Any] = {}

    def save(self, policy: DraftPolicy) -> None:
        self.learned = json.loads(json.dumps(learned_of(policy)))


def adaptive(
    texts: Sequence[Text],
    names: Sequence[str],
    machine: Machine = Machine(),
    batch: int = 1,
    memory: Remembered | None = None,
    costs: CycleCosts | None = None,
) -> float:
    """Returns the seconds of the policy over some sources.  costs: as it begins; None: those of a dense model."""
    clock = Clock()
    sources = [Recorded(name, clock, machine) for name in names]
    policy = DraftPolicy(sources, 63, costs=costs, save=memory.save if memory else None, clock=clock)
    if memory:
        teach(policy, memory.learned)
    drafted = Draft([], [])

    def draft(live: Sequence[Request]) -> list[DraftTree]:
        nonlocal drafted
        drafted = policy.draft(live)
        if machine.experts:
            drafted.experts = machine.experts(len(live) + drafted.nodes)
        return drafted.trees

    def observe(live: Sequence[Request], committed: list[list[int]]) -> None:
        for source in sources:
            for request, tokens in zip(live, committed, strict=True):
                source.observe(request, tokens)
        policy.observe(drafted, committed)

    return run(texts, draft, clock, machine, batch, observe)
