"""The tensors of gpt-oss under the names of tensors.py.

Floats are transposed, and columns of gate and up alternate: mlp.experts.gate_up_proj [E, hidden, 2 I] and down_proj
[E, I, hidden]. MXFP4 has rows: gate_up_proj_blocks uint8 [E, 2 I, hidden / 32, 16], two columns a byte with the even
one in the low half, and gate_up_proj_scales uint8 [E, 2 I, hidden / 32]; likewise for down_proj. Biases of both are
gate_up_proj_bias [E, 2 I] and down_proj_bias [E, hidden].
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from specengine.models.checkpoint_base import Checkpoint, TensorInfo
from specengine.models.quantised.stored import powers, unpacked
from specengine.ops.coded.rows import CodedRows, Coding

_STORED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_CODING = Coding("e2m1", 32)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: at name + kind. first, step: of its rows there.

    expert: None for a tensor that the file has as it is.
    """

    name: str
    kind: str = ""
    expert: int | None = None
    first: int = 0
    step: int = 1


class GptOssTensors(Checkpoint):
    """A checkpoint of gpt-oss, one matrix and one bias for each part of each expert.

    It keeps the matrices of the last expert that was read: every read takes a whole one.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self.source, self.config, self.metadata = stored.source, stored.config, stored.metadata
        self._stored = stored
        self._places: dict[str, _Place] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._last: dict[str, tuple[tuple[str, int], torch.Tensor]] = {}  # by kind
        for name, info in stored.tensors.items():
            found = _STORED.fullmatch(name)
            if found is None:
                own = name.replace(".mlp.router.", ".mlp.gate.")
                self._places[own], self.tensors[own] = _Place(name), info
            else:
                self._list(name, info, found[1], found[2], found[3] or "")

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        """See Checkpoint."""
        if self._info(name).coding is None:
            return self._stored.read_coded(self._places[name].name, start, stop)
        place = self._places[name]
        packed = self._rows(place, "_blocks", start, stop).flatten(1)
        exponents = self._rows(place, "_scales", start, stop)
        if (exponents == 255).any():
            raise ValueError(f"{self.source}: tensor '{name}' has a scale of 255, which stands for no number")
        return CodedRows(_CODING, unpacked(packed, 4, self.tensors[name].shape[1]), powers(exponents))

    def column_order(self, name: str) -> torch.Tensor | None:
        """See Checkpoint."""
        place = self._places.get(name)
        return None if place is None or place.expert is not None else self._stored.column_order(place.name)

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        place = self._places[name]
        if place.expert is None:
            out.copy_(self._stored.read_rows(place.name, start, stop))
        elif place.kind == "_blocks":
            out.copy_(self.read_coded(name, start, stop).values())
        else:
            out.copy_(self._rows(place, place.kind, start, stop))

    def _rows(self, place: _Place, kind: str, start: int, stop: int) -> torch.Tensor:
        """Reads rows [start, stop) of a part of an expert from the stored tensor of a kind."""
        assert place.expert is not None
        key = place.name, place.expert
        if kind not in self._last or self._last[kind][0] != key:
            rows = self._stored.read_rows(place.name + kind, place.expert, place.expert + 1)[0]
            self._last[kind] = key, rows if kind else rows.T
        return self._last[kind][1][place.first :: place.step][start:stop]

    def _list(self, name: str, info: TensorInfo, prefix: str, part: str, kind: str) -> None:
        """Enters the matrices or biases that one stored tensor holds."""
        moe = self.config.moe
        assert moe is not None
        rows, columns = 2 * moe.intermediate_size, self.config.hidden_size
        parts = {"gate_proj": 0, "up_proj": 1}
        if part == "down_proj":
            rows, columns, parts = columns, moe.intermediate_size, {"down_proj": 0}
        shapes = {"": (columns, rows), "_bias": (rows,), "_blocks": (rows, columns // 32, 16)}
        shapes["_scales"] = rows, columns // 32
        expected = moe.num_experts, *shapes[kind]
        if info.shape != expected:
            raise ValueError(f"{self.source}: tensor '{name}' has shape {info.shape}, expected {expected}")
        if kind in ("_blocks", "_scales") and columns % 32:
            raise ValueError(f"{self.source}: tensor '{name}' has {columns} columns, expected a multiple of 32")
        beside = f"{prefix}.{part}{'_scales' if kind == '_blocks' else '_blocks'}"
        if kind in ("_blocks", "_scales") and (info.dtype != "uint8" or beside not in self._stored.tensors):
            raise ValueError(f"{self.source}: tensor '{name}' has type {info.dtype}, expected uint8 beside '{beside}'")
        if kind == "_scales":
            return
        own_rows = rows // len(parts)
        shape = (own_rows,) if kind == "_bias" else (own_rows, columns)
        own = replace(info, shape=shape) if kind != "_blocks" else TensorInfo(shape, "float32", _CODING)
        end = "bias" if kind == "_bias" else "weight"
        for expert in range(moe.num_experts):
            for each, first in parts.items():
                full = f"{prefix}.{expert}.{each}.{end}"
                if full in self._places:
                    raise ValueError(f"{self.source}: tensor '{name}' and another one both have '{full}'")
                self._places[full] = _Place(f"{prefix}.{part}", kind, expert, first, len(parts))
                self.tensors[full] = own
