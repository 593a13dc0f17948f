"""What reads the slots' outputs: a head gives, level by level, the logits of what follows the drafted tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from specengine.drafters.block.vocabulary import Vocabulary
from specengine.drafters.growth import Steps
from specengine.ops.growth.growing_trees import GrownRows, Logits
from specengine.ops.growth.row_inputs import join_rows
from specengine.ops.row_tools import stack_rows, take_rows
from specengine.ops.weight import Projection, Weight
from specengine.utils.host_memory import is_host


class BlockHead(ABC):
    """Reads outputs.

    reads_path: whether a node's children depend on the drafted tokens above.
    """

    reads_path: bool = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.ops = vocabulary, vocabulary.ops

    @abstractmethod
    def draft(self, slots: torch.Tensor, roots: torch.Tensor) -> Steps:
        """Drafts as DraftNetwork does, of slots' outputs [levels, B, hidden]. roots: int32 [B], the tokens."""

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

    def rows_of(self, weight: Weight, tokens: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a matrix's rows [R, columns] of tokens int32 [R]; those of -1 have no meaning."""
        dtype = torch.float32 if weight.data.dtype == torch.uint8 else dtype  # codes become floats
        rows = torch.empty(len(tokens), columns, dtype=dtype, device=tokens.device)
        self.ops.gather_rows(weight, tokens.clamp(min=0) if is_host(tokens.device) else tokens, rows)
        return rows


class PlainHead(BlockHead):
    """The output head alone (DFlash, JetSpec): a level's tokens do not depend on those above."""

    reads_path = False

    def draft(self, slots: torch.Tensor, roots: torch.Tensor) -> Steps:
        logits = self.vocabulary.scaled(self.vocabulary.logits(slots.flatten(0, 1)))
        yield Logits(logits, levels=len(slots), by_request=False)


class PathMemory:
    """What a head remembers of the nodes that were open, a tensor [R, n] for each step."""

    def __init__(self) -> None:
        self._steps: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor) -> None:
        """Adds that of a step's nodes."""
        self._steps.append(rows)

    def named(self, rows: GrownRows) -> torch.Tensor:
        """Returns the tensor whose rows `rows.above` names."""
        return stack_rows(self._steps) if rows.by_node else self._steps[-1]

    def above(self, rows: GrownRows) -> torch.Tensor:
        """Returns what is remembered of the parents of open nodes, [R, n]."""
        return self.named(rows) if rows.in_place else take_rows(self.named(rows), rows.above)


def at_level(values: torch.Tensor, rows: GrownRows | None) -> torch.Tensor:
    """Returns what the slots after open nodes have, [B, ..]; a request's nodes share it.

    values: [levels, B, ..].  rows: the nodes; None: the roots.
    """
    if rows is None or not rows.by_node:
        return values[rows.level if rows else 0]
    batch = values.shape[1]
    places = rows.depths.clamp(min=0) * batch + torch.arange(batch, dtype=torch.int32, device=values.device)
    return values.flatten(0, 1).index_select(0, places)


def shared(slots: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns what each of `rows` nodes has of its request's, [B, ..]."""
    return slots if len(slots) == rows else slots.repeat_interleave(rows // len(slots), 0)


def beside(slots: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns slots [B, C] and rows float32 [R, D] of nodes side by side, [R, C + D], in a dtype."""
    if is_host(rows.device):
        return torch.cat([shared(slots, len(rows)), rows], -1)
    return join_rows(slots, rows, dtype)
