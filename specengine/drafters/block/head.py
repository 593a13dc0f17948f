"""What reads the slots' outputs: a head gives, level by level, the likeliest tokens behind drafted ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from specengine.drafters.block.vocabulary import Best, Likeliest, Vocabulary
from specengine.ops.growth.level_trees import GrowingTrees, GrownRows
from specengine.ops.row_tools import take_rows
from specengine.ops.weight import Projection

LEAST = 1e-30  # of a chance that a head estimates, so that its logarithm is finite


@dataclass(frozen=True)
class Children:
    """The likeliest children of R nodes, likeliest first.

    tokens: int32 [R, k], the target's.  log_probs: float32 [R, k].  memory: see Step.
    confidence: float32 [R], the chance that the first child is accepted; None: the head does not estimate it.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    memory: torch.Tensor | None = None
    confidence: torch.Tensor | None = None

    @property
    def chances(self) -> torch.Tensor:
        """The chance of each child, float32 [R, k]: the first one's is its confidence, others share the rest."""
        probabilities = self.log_probs.exp()
        if self.confidence is None:
            return probabilities
        first = self.confidence[:, None]
        others = probabilities[:, 1:] * ((1 - first) / (1 - probabilities[:, :1]).clamp(min=1e-6)).clamp(max=1.0)
        return torch.cat([first, others], dim=1)

    @property
    def scores(self) -> torch.Tensor:
        """The logarithms of the chances, float32 [R, k], all finite where the head estimates them."""
        return self.log_probs if self.confidence is None else self.chances.clamp(LEAST, 1.0).log()


@dataclass(frozen=True)
class Step:
    """What a head computes behind R nodes: the distributions of their children.

    logits: float32 [R, Vd], of the drafter's tokens.  memory: [R, n], what the head remembers of the paths up to these
    nodes, or None.  confidence: as of Children.
    """

    logits: torch.Tensor
    memory: torch.Tensor | None = None
    confidence: torch.Tensor | None = None


class OpenDraft(ABC):
    """The drafts of one pass of B blocks."""

    @abstractmethod
    def step(self, level: int, owners: torch.Tensor | None, tokens: torch.Tensor, memory: torch.Tensor | None) -> Step:
        """Computes the distributions behind R nodes of a level; level 0 is that of the roots.

        owners: int64 [R], the block of each node; None: every block has as many, one block after the other.
        tokens: int32 [R], of the nodes, the target's.  memory: what the head remembers of the paths before these nodes;
        None at level 0.
        """

    @abstractmethod
    def children(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Children:
        """Returns the likeliest children of these nodes. The arguments are those of step()."""

    @abstractmethod
    def best(self, level: int, tokens: torch.Tensor, memory: torch.Tensor | None) -> tuple[Best, torch.Tensor | None]:
        """Returns the same as captured cycles take it, and what the head remembers; every block has as many nodes.

        Nodes of one block that have the same children may share them. The next call may overwrite what is returned.
        """

    def all_levels(self) -> Best | None:
        """Returns what best() does of every level, row level * B + block; None where children depend on the path."""
        return None

    def grow(
        self, trees: GrowingTrees, level: int, tokens: torch.Tensor, memory: Any, above: torch.Tensor | None
    ) -> tuple[GrownRows | None, Any]:
        """Adds the children of a level's nodes to trees inside a captured cycle; returns their rows and the memory.

        tokens: int32 [R].  memory: what the level before returned; None at level 0.
        above: int64 [R], the nodes before that these continue; None: those of their number.
        """
        if memory is not None and above is not None:
            memory = take_rows(memory, above)
        best, memory = self.best(level, tokens, memory)
        return trees.grow(best), memory


def of_level(values: torch.Tensor, level: int, owners: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Returns what the blocks of `rows` nodes have at a level, [rows, ..].

    values: [levels, B, ..].  owners: as OpenDraft.step takes them.
    """
    own = values[level]
    if owners is not None:
        return own[owners]
    return own if len(own) == rows else own.repeat_interleave(rows // len(own), 0)


class BlockHead(ABC):
    """Reads outputs.

    reads_path: whether a node's children depend on the drafted tokens above.
    """

    reads_path: bool = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._likeliest: dict[int, Likeliest] = {}  # by children

    @property
    def projections(self) -> list[Projection]:
        """Its linear layers."""
        return [self.vocabulary.head]

    @property
    def estimates(self) -> bool:
        """Whether it estimates the chance that a token is accepted."""
        return False

    @property
    def most_children(self) -> int:
        """Children that a node can have."""
        return self.vocabulary.head.rows

    def likeliest(self, count: int) -> Likeliest:
        """Returns the op that finds the `count` likeliest children of a node."""
        if count not in self._likeliest:
            self._likeliest[count] = Likeliest(self.vocabulary, count)
        return self._likeliest[count]

    @abstractmethod
    def open(self, outputs: torch.Tensor, count: int) -> OpenDraft:
        """Begins the drafts of slots' outputs [levels, B, hidden]. count: children of every node."""


class PlainHead(BlockHead):
    """The output head alone (DFlash, JetSpec): a level's tokens do not depend on those above."""

    reads_path = False

    def open(self, outputs: torch.Tensor, count: int) -> OpenDraft:
        levels, batch, _ = outputs.shape
        logits = self.vocabulary.scaled(self.vocabulary.logits(outputs.flatten(0, 1)))
        return _PlainDraft(self.likeliest(count), logits.view(levels, batch, -1))


class _PlainDraft(OpenDraft):
    """logits: [levels, B, Vd]."""

    def __init__(self, likeliest: Likeliest, logits: torch.Tensor) -> None:
        self._likeliest, self._logits = likeliest, logits

    def step(self, level: int, owners: torch.Tensor | None, tokens: torch.Tensor, memory: torch.Tensor | None) -> Step:
        return Step(of_level(self._logits, level, owners, len(tokens)))

    def children(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Children:
        own, log_probs = self._children
        return Children(own[level, owners], log_probs[level, owners])

    def best(self, level: int, tokens: torch.Tensor, memory: torch.Tensor | None) -> tuple[Best, torch.Tensor | None]:
        own, scores = (each.view(*self._logits.shape[:2], -1) for each in self._best)
        return Best(own[level], scores[level]), None

    def all_levels(self) -> Best:
        return self._best

    @cached_property
    def _children(self) -> list[torch.Tensor]:
        """The likeliest tokens and their log-probabilities, [levels, B, k] each."""
        return [each.view(*self._logits.shape[:2], -1) for each in self._likeliest(self._logits.flatten(0, 1))]

    @cached_property
    def _best(self) -> Best:
        """The same as captured cycles take it, [levels * B, 1 + k] each."""
        return self._likeliest.best(self._logits.flatten(0, 1))


class PathDraft(OpenDraft):
    """The drafts of a head that reads the path. likeliest: finds the children of every node."""

    def __init__(self, likeliest: Likeliest) -> None:
        self._likeliest = likeliest

    def children(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Children:
        step = self.step(level, owners, tokens, memory)
        return Children(*self._likeliest(step.logits), step.memory, step.confidence)

    def best(self, level: int, tokens: torch.Tensor, memory: torch.Tensor | None) -> tuple[Best, torch.Tensor | None]:
        step = self.step(level, None, tokens, memory)
        best = self._likeliest.best(step.logits)
        if step.confidence is not None:
            scores = Children(best.tokens[:, 1:], best.scores[:, 1:], None, step.confidence).scores
            best.scores[:, 1:] = scores
        return best, step.memory
