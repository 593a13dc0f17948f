"""What reads the slots' outputs: a head gives, level by level, the likeliest tokens behind drafted ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from specengine.drafters.block.vocabulary import Likeliest, Vocabulary
from specengine.ops.weight import Projection


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
    def step(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Step:
        """Computes the distributions behind R nodes of a level; level 0 is that of the roots.

        owners: int64 [R], the block of each node.  tokens: int32 [R], of the nodes, the target's.  memory: what the
        head remembers of the paths before these nodes; None at level 0.
        """

    @abstractmethod
    def children(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Children:
        """Returns the likeliest children of these nodes. The arguments are those of step()."""


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
        """Begins the drafts of outputs float32 [B, levels, hidden]. count: children of every node."""


class PlainHead(BlockHead):
    """The output head alone (DFlash, JetSpec): a level's tokens do not depend on those above."""

    reads_path = False

    def open(self, outputs: torch.Tensor, count: int) -> OpenDraft:
        batch, levels, _ = outputs.shape
        logits = self.vocabulary.scaled(self.vocabulary.logits(outputs.flatten(0, 1)))
        tokens, log_probs = self.likeliest(count)(logits)
        return _PlainDraft(*(found.view(batch, levels, -1) for found in (logits, tokens, log_probs)))


@dataclass(frozen=True)
class _PlainDraft(OpenDraft):
    """logits: [B, levels, Vd].  tokens, log_probs: [B, levels, k]."""

    logits: torch.Tensor
    tokens: torch.Tensor
    log_probs: torch.Tensor

    def step(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Step:
        return Step(self.logits[owners, level])

    def children(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Children:
        return Children(self.tokens[owners, level], self.log_probs[owners, level])


class PathDraft(OpenDraft):
    """The drafts of a head that reads the path. likeliest: finds the children of every node."""

    def __init__(self, likeliest: Likeliest) -> None:
        self._likeliest = likeliest

    def children(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Children:
        step = self.step(level, owners, tokens, memory)
        return Children(*self._likeliest(step.logits), step.memory, step.confidence)
