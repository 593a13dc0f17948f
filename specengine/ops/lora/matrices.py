"""The matrices of an engine's adapters, laid out for the ops; made once at load.

Shapes: N output columns, K input columns, G adapters, R the largest rank, a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from specengine import _C
from specengine.ops.weight import FLOAT_FORMATS


@dataclass(frozen=True)
class LoraModule:
    """One matrix in all adapters of an engine, in panels of 16 ranks (a) and of 16 output columns (b).

    a: [G, R / 16, K, 16].  b: [G, ceil(N / 16), R, 16].  ranks: int32 [G]; 0: the adapter leaves this matrix alone.
    scales: float32 [G].  first: column of the projection's output where its rows begin.  rows: N.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    first: int
    rows: int


@dataclass(frozen=True)
class LoraProjection:
    """The adapted matrices of one projection; none where no adapter has any."""

    modules: tuple[LoraModule, ...] = ()

    @cached_property
    def native(self) -> _C.LoraProjection:
        """The projection as the core takes it; the core borrows the matrices and keeps them alive."""
        return _C.LoraProjection(
            tuple(_C.LoraModule(m.a, m.b, m.ranks, m.scales, m.first, m.rows) for m in self.modules)
        )


@dataclass(frozen=True)
class LoraLayer:
    """What the adapters of an engine add to one decoder layer."""

    qkv: LoraProjection
    attention_out: LoraProjection
    gate_up: LoraProjection
    down: LoraProjection

    @property
    def projections(self) -> tuple[LoraProjection, ...]:
        return self.qkv, self.attention_out, self.gate_up, self.down

    @staticmethod
    def empty() -> LoraLayer:
        """Returns what adds nothing."""
        return LoraLayer(*[LoraProjection()] * 4)

    @cached_property
    def native(self) -> _C.LoraLayer:
        """The layer as the core takes it."""
        return _C.LoraLayer(*(projection.native for projection in self.projections))


def stack_lora(
    matrices: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None],
    format: str,
    first: int,
    device: torch.device,
) -> LoraModule:
    """Lays out one matrix of all adapters, at least one of which has it: A [r, K], B [N, r] and the scale, or None.

    format: one of FLOAT_FORMATS. Raises ValueError where a value is too large for it.
    """
    present = [each for each in matrices if each is not None]
    panel, dtype = _C.PANEL, FLOAT_FORMATS[format]
    columns, rows = present[0][0].shape[1], present[0][1].shape[0]
    rank = -(-max(len(a) for a, _, _ in present) // panel) * panel
    out_panels = -(-rows // panel)
    a_panels = torch.zeros(len(matrices), rank // panel, columns, panel, dtype=dtype)
    b_panels = torch.zeros(len(matrices), out_panels, rank, panel, dtype=dtype)
    for number, each in enumerate(matrices):
        if each is None:
            continue
        a, b, _ = each
        a_panels[number] = F.pad(a, (0, 0, 0, rank - len(a))).view(-1, panel, columns).mT
        padded = F.pad(b, (0, rank - len(a), 0, out_panels * panel - rows))
        b_panels[number] = padded.view(out_panels, panel, rank).mT
        if not (a_panels[number].isfinite().all() and b_panels[number].isfinite().all()):
            raise ValueError(f"it has values too large for {format}, in which the target's adapters are kept")
    ranks = torch.tensor([0 if each is None else len(each[0]) for each in matrices], dtype=torch.int32)
    scales = torch.tensor([0.0 if each is None else each[2] for each in matrices], dtype=torch.float32)
    return LoraModule(a_panels.to(device), b_panels.to(device), ranks.to(device), scales.to(device), first, rows)
