"""GGUF checkpoints: reads a llama.cpp file under Hugging Face names, in their row order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from specengine.models.checkpoint_base import BLOCK_TYPES, Checkpoint, TensorInfo
from specengine.models.config import MOST_EXPERTS
from specengine.models.config_gguf import config_from_gguf
from specengine.models.gguf_codes import CODINGS, code_rows
from specengine.models.gguf_dialects import is_beside, normal_metadata, normal_name
from specengine.models.gguf_file import GGUFFile
from specengine.models.gguf_names import expert_names, hf_name, stored_rows
from specengine.models.gguf_types import BlockType, block_values
from specengine.ops.coded.rows import CodedRows
from specengine.ops.weight import FLOAT_FORMATS

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MOST_DRAFTER_BLOCKS = 8  # published files have one; a damaged count must not cost time
_ROPE_FREQS = "rope_freqs.weight"


class GGUFCheckpoint(Checkpoint):
    """One GGUF file, or all parts of a split one; `file` gives access to its header.

    Tensors of other networks than the language model are left aside.

    with_drafter: the blocks of the drafter in the file are listed too, as layers behind those of the text model.
    """

    step_bytes = 2 << 20  # dequantisation needs several times the memory of its result

    def __init__(self, path: str | Path, with_drafter: bool = False) -> None:
        self.source = str(path)
        self.file = GGUFFile(path)
        self.metadata = metadata = normal_metadata(self.file)
        self._factors = {name: self._factor(name) for name, t in self.file.tensors.items() if t.type.name == "NVFP4"}
        beside = {name for weight in self._factors for name in _beside(weight)}
        self._stored: dict[str, str] = {}
        self._first: dict[str, int] = {}  # row of a tensor where an expert's matrix begins
        self.tensors: dict[str, TensorInfo] = {}
        for stored in self.file.tensors:
            if stored not in {_ROPE_FREQS, *beside} and not is_beside(stored):
                self._list(stored)
        shapes = {normal_name(name): tensor.shape for name, tensor in self.file.tensors.items()}
        self.config = config_from_gguf(metadata, shapes, self._rope_freqs(), self.source)
        if self.config.gated_delta is not None and not with_drafter:
            self._leave_drafter(metadata[f"{metadata['general.architecture']}.block_count"])

    def _list(self, stored: str) -> None:
        """Enters the tensors that one stored tensor holds: itself, or the matrices of all experts."""
        info, shape, normal = self._describe(stored), self.file.tensors[stored].shape, normal_name(stored)
        dims = 2 if normal.endswith(".bias") else 3
        experts = expert_names(normal, shape[0]) if len(shape) == dims and shape[0] <= MOST_EXPERTS else []
        for number, name in enumerate(experts):
            rows = shape[1] * shape[0] // len(experts)  # of one matrix: gate and up may lie in one tensor
            self._enter(name, stored, replace(info, shape=(rows, *shape[2:])), number * (rows if dims == 3 else 1))
        if not experts:
            name = hf_name(normal)
            name = stored if name == normal else name  # unknown
            if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
                info = replace(info, shape=(1, *shape))
            elif name.endswith("linear_attn.conv1d.weight") and len(shape) == 2:
                info = replace(info, shape=(shape[0], 1, shape[1]))
            self._enter(name, stored, info)

    def _enter(self, name: str, stored: str, info: TensorInfo, first: int = 0) -> None:
        if name in self._stored:
            raise ValueError(f"{self.source}: tensors '{self._stored[name]}' and '{stored}' both are '{name}'")
        self._stored[name], self._first[name], self.tensors[name] = stored, first, info

    def _leave_drafter(self, blocks: int) -> None:
        """Leaves aside the blocks of the drafter in the file, which follow those of the text model."""
        for block in range(self.config.num_layers, min(blocks, self.config.num_layers + _MOST_DRAFTER_BLOCKS)):
            for name in [each for each, stored in self._stored.items() if stored.startswith(f"blk.{block}.")]:
                del self.tensors[name], self._stored[name]

    def _describe(self, stored: str) -> TensorInfo:
        tensor = self.file.tensors[stored]
        kind = tensor.type.name
        if kind not in _FLOATS and not (kind in (*BLOCK_TYPES, *CODINGS) and len(tensor.shape) > 1):
            supported = ", ".join((*_FLOATS, *BLOCK_TYPES, *CODINGS))
            raise ValueError(f"{self.source}: tensor '{stored}' has type {kind}; supported are {supported}")
        if kind in CODINGS:
            return TensorInfo(tensor.shape, "float32", CODINGS[kind])
        return TensorInfo(tensor.shape, _FLOATS.get(kind, kind))

    def _rope_freqs(self) -> list[float]:
        return self._vector(_ROPE_FREQS) if _ROPE_FREQS in self.file.tensors else []

    def _factor(self, weight: str) -> float:
        """Reads the scale of a whole NVFP4 tensor; a file without one means 1."""
        name = next((name for name in _beside(weight)[:2] if name in self.file.tensors), None)
        factor = [1.0] if name is None else self._vector(name)
        if len(factor) != 1 or not np.isfinite(factor[0]):
            raise ValueError(f"{self.source}: tensor '{name}' must be one finite number of type F32")
        return factor[0]

    def _vector(self, name: str) -> list[float]:
        tensor = self.file.tensors[name]
        if tensor.type != BlockType.F32 or len(tensor.shape) != 1:
            raise ValueError(f"{self.source}: tensor '{name}' must be a vector of type F32")
        return self.file.read_rows(name, 0, tensor.shape[0]).view("<f4").ravel().tolist()

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(self._stored_bytes(name, start, stop))

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        if self._info(name).coding is None:
            return super().read_coded(name, start, stop)
        stored = self._stored[name]
        kind, factor = self.file.tensors[stored].type.name, self._factors.get(stored, 1.0)
        try:
            return code_rows(kind, self._stored_bytes(name, start, stop), factor)
        except ValueError as error:
            raise ValueError(f"{self.source}: tensor '{stored}': {error}") from None

    def _stored_bytes(self, name: str, start: int, stop: int) -> np.ndarray:
        if len(self.file.tensors[self._stored[name]].shape) == 1 < len(self._info(name).shape):  # a vector is one row
            return self.file.read_rows(self._stored[name], 0, self._info(name).shape[1])
        if len(self.file.tensors[self._stored[name]].shape) > len(self._info(name).shape) == 1:  # one of many vectors
            row = self.file.read_rows(self._stored[name], self._first[name], self._first[name] + 1).ravel()
            return row.reshape(self._info(name).shape[0], -1)[start:stop]
        rows = stored_rows(self.config, name, start, stop) + self._first[name]
        first = int(rows.min())
        return self.file.read_rows(self._stored[name], first, int(rows.max()) + 1)[rows - first]

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        if self.tensors[name].coding is not None:
            out.copy_(self.read_coded(name, start, stop).values().view(out.shape))
            return
        data = self._stored_bytes(name, start, stop)
        kind = self.file.tensors[self._stored[name]].type
        if kind.name in _FLOATS:
            out.copy_(torch.from_numpy(data).view(FLOAT_FORMATS[_FLOATS[kind.name]]).view(out.shape))
        else:
            out.copy_(block_values(data, kind).view(out.shape))


def _beside(weight: str) -> tuple[str, ...]:
    """Names the tensors beside an NVFP4 weight: its scale in two spellings, then scales of activations."""
    stem = weight.removesuffix(".weight")
    return f"{stem}.scale", f"{stem}.weight.scale", f"{stem}.input_scale", f"{stem}.weight.input_scale"
