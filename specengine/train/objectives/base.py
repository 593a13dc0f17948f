"""What a drafter's training gives the trainer: a network, its loss and what is stored of it.

Everywhere, level i = 1, 2, ... of row t guesses token t + i + 1, having read tokens up to t + 1 and the target's
features up to position t: what a cycle whose root is token t + 1 does. The target's own answer is `greedy[t + i]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from specengine.models.config import ModelConfig


@dataclass(frozen=True)
class TrainingBatch:
    """B dialogues of up to T tokens, padded at the end with token 0; position ids are 0 .. T - 1.

    tokens: int64 [B, T].  lengths: int64 [B].  wanted: bool [B, T], whether the token after a position is one to learn
    (false in the padding).  greedy: int64 [B, T], the target's most likely token after each position.
    last: float [B, T, C], the target's state after its final norm.  at_layers: float [B, T, hidden_state_layers, C].
    keys, values: float [layers, B, K, T, D] of the target's layers asked for, keys turned to their positions.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    wanted: torch.Tensor
    greedy: torch.Tensor
    last: torch.Tensor
    at_layers: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    """What drafters share with their target and never change.

    embedding: float32 [V, C].  head: float32 [V', C], the target's rows for the drafter's vocabulary.
    vocabulary: int64 [V'], its target ids, ascending; None: all.
    read: a tensor of the target's checkpoint by its name, float32.
    """

    config: ModelConfig
    embedding: torch.Tensor
    head: torch.Tensor
    vocabulary: torch.Tensor | None
    read: Callable[[str], torch.Tensor]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[.., C] of token ids [..]."""
        return functional.embedding(tokens, self.embedding)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[.., V'] of normed states [.., C]."""
        return functional.linear(states, self.head.to(states.dtype))

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of rows of the drafter's vocabulary."""
        return draft_ids if self.vocabulary is None else self.vocabulary[draft_ids]

    def draft_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the drafter's vocabulary of target ids; -1 for tokens outside it."""
        if self.vocabulary is None:
            return tokens
        row = torch.searchsorted(self.vocabulary, tokens).clamp_(max=len(self.vocabulary) - 1)
        return torch.where(self.vocabulary[row] == tokens, row, -1)

    def vocabulary_tensors(self) -> dict[str, torch.Tensor]:
        """`d2t` int64 [V'], target id minus draft id, as published; nothing where the vocabulary is the target's."""
        if self.vocabulary is None:
            return {}
        return {"d2t": self.vocabulary.cpu() - torch.arange(len(self.vocabulary))}


@dataclass(frozen=True)
class LevelReport:
    """Sums over rows, float64 [levels] each, so that reports of batches and processes add up.

    loss: unweighted.  rows: with something to learn.  agreed: rows whose best guess is the target's greedy token.
    reached: rows whose guesses above this level are all the target's (and the text went that way).
    accepted, near: of these, those whose best guess, one of whose best NEAR guesses, is the target's.
    """

    NEAR: ClassVar[int] = 4

    loss: torch.Tensor
    rows: torch.Tensor
    agreed: torch.Tensor
    reached: torch.Tensor
    accepted: torch.Tensor
    near: torch.Tensor

    @staticmethod
    @torch.no_grad()
    def of(losses: Sequence[torch.Tensor], ranked: Sequence[torch.Tensor], batch: TrainingBatch) -> LevelReport:
        """losses: per level, the sum over its rows.  ranked: per level int64 [B, T, k <= NEAR], its best target ids."""
        sums: list[list[torch.Tensor]] = []
        on_path = batch.tokens.new_ones(batch.tokens.shape, dtype=torch.bool)
        for i, (loss, guesses) in enumerate(zip(losses, ranked, strict=True), start=1):
            truth, wanted = ahead(batch.greedy, i), ahead(batch.wanted, i)
            hits = guesses == truth[..., None]
            best, reached = hits[..., 0], on_path & wanted
            counts = (wanted, best & wanted, reached, best & reached, hits.any(-1) & reached)
            sums.append([loss.detach().double(), *(count.sum().double() for count in counts)])
            on_path = reached & best & (ahead(batch.tokens, i + 1) == truth)
        return LevelReport(*(torch.stack(column).cpu() for column in zip(*sums, strict=True)))

    def __add__(self, other: LevelReport) -> LevelReport:
        return LevelReport(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def acceptance(self) -> list[float]:
        """By level: how often the best guess is taken where all above it were."""
        return _share(self.accepted, self.reached)

    @property
    def near_acceptance(self) -> list[float]:
        """By level: how often one of the best NEAR guesses is taken where all best guesses above it were."""
        return _share(self.near, self.reached)

    @property
    def tau(self) -> float:
        """Expected tokens per cycle of a chain of all levels, the target's own token included."""
        return 1.0 + self._expected(self.acceptance)

    @property
    def near_tau(self) -> float:
        """As tau, of the tree whose backbone are the best guesses and whose siblings the other best NEAR ones."""
        return 1.0 + self._expected(self.near_acceptance)

    def _expected(self, taken: list[float]) -> float:
        on_path, total = 1.0, 0.0
        for best, some in zip(self.acceptance, taken, strict=True):
            total += on_path * some
            on_path *= best
        return total


def discounted(losses: Sequence[torch.Tensor], decay: float) -> torch.Tensor:
    """The sum of all levels' losses, each counted `decay` times the one above."""
    return sum((decay**i * loss for i, loss in enumerate(losses)), losses[0].new_zeros(()))


def ahead(x: torch.Tensor, steps: int) -> torch.Tensor:
    """x [B, T, ..] shifted so that row t holds what row t + steps held; zeros (false) at the end."""
    tail = x[:, :steps] if steps < x.shape[1] else x
    return torch.cat([x[:, steps:], torch.zeros_like(tail)], 1)


class Objective(ABC):
    """One drafter's network and loss. A subclass is made with (frozen, options: an instance of its options_type).

    name: as in --drafter.  options_type: a frozen dataclass that checks its ranges.  learning_rate: the default.
    frozen: what it was made with.
    network: all that is trained, in plain PyTorch with the parameter names of published checkpoints.
    hidden_state_layers: layers of the target whose input it reads.  kv_layers: layers whose keys and values it reads.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[Any]]
    learning_rate: ClassVar[float] = 5e-5
    frozen: Frozen
    network: nn.Module
    hidden_state_layers: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] = ()

    @abstractmethod
    def __init__(self, frozen: Frozen, options: Any) -> None:
        """A network at its start."""

    @classmethod
    def check(cls, config: ModelConfig, options: Any) -> None:
        """Raises ValueError for a target that it cannot learn from: asked before any data is made."""
        return None

    def prepare(self, batch: TrainingBatch) -> None:
        """Sees some dialogues before the first step of a run, the same ones in every process."""
        return None

    def rate_of(self, name: str) -> float:
        """The learning rate of a parameter of the network, of the run's."""
        return 1.0

    def vocabulary_rows(self) -> list[str]:
        """Names of the network's tensors that have a row per token of the drafter's vocabulary."""
        return [name for name in self.network.state_dict() if name.endswith("lm_head.weight")]

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The network's state of tensors as export() gives them: its inverse. Asked after prepare()."""
        return {name: tensors.get(name, own) for name, own in self.network.state_dict().items()}

    @abstractmethod
    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """The weighted loss summed over rows (the trainer divides by the wanted tokens of a step), and the report."""

    @abstractmethod
    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """config.json and the tensors of the published layout, floats as they are trained."""


def _share(part: torch.Tensor, whole: torch.Tensor) -> list[float]:
    return (part / whole.clamp(min=1)).tolist()
