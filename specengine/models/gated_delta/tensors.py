"""The tensors of hybrids under the names and in the layouts of this project, however a folder or GGUF file has them.

Names are those of transformers' Qwen3_5TextModel, but linear_attn.decay is -exp(A_log), as GGUF files have it. Files
of text and vision put `model.language_model.` before them. Norms are stored as w and multiply by 1 + w, so they get
their 1 here; GGUF files hold 1 + w. linear_attn.norm multiplies by w. Qwen3-Next interleaves in_proj_qkvz
[q | k | v | z] and in_proj_ba [b | a] by key head; the rows are put in order, so quantised rows keep their codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from specengine.models.checkpoint_base import Checkpoint, TensorInfo
from specengine.models.gated_delta.hf_config import HYBRIDS
from specengine.ops.coded.rows import CodedRows
from specengine.utils.gated_delta_config import GatedDeltaConfig

DRAFTER = "mtp."  # how tensors of the drafter in the file begin
_VISION = ("model.visual.", "visual.")
_ASIDE = (DRAFTER, *_VISION)
_FOLDED = re.compile(r"(?!.*linear_attn\.norm).*norm\.weight")
_INTERLEAVED = re.compile(r"(.*\.linear_attn)\.in_proj_(qkvz|ba)\.weight")
_A_LOG = ".linear_attn.A_log"


@dataclass(frozen=True)
class _Pieces:
    """Rows of a tensor interleaved by key head: of each block of `block` rows, `size` rows from `first` on.

    An entry of `parts` is such a pair (first, size); the tensor has all blocks of one entry, then those of the next.
    """

    heads: int
    block: int
    parts: tuple[tuple[int, int], ...]

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Lists the stored rows of rows [start, stop), as ranges in order."""
        at = 0
        for first, size in self.parts:
            for head in range(self.heads):
                low, high = max(start, at), min(stop, at + size)
                if low < high:
                    offset = head * self.block + first - at
                    yield low + offset, high + offset
                at += size


class HybridTensors(Checkpoint):
    """A checkpoint of a hybrid with the tensors of its text model alone.

    published: tensors have the values and layouts of the files, and the drafter's are among them.
    folded: norms are stored as 1 + w.
    """

    def __init__(self, stored: Checkpoint, published: bool = False, folded: bool = False) -> None:
        self.source, self.config, self.metadata = stored.source, stored.config, stored.metadata
        self._stored, self._published, self._folded = stored, published, folded
        self._names: dict[str, str] = {}
        self._pieces: dict[str, _Pieces] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in stored.tensors.items():
            if published and not name.startswith(_VISION):
                self._enter(_of_text(name), name, info)
            elif not published and not name.startswith(_ASIDE):
                self._list(name, info)

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Checkpoint."""
        self._info(name)
        ranges = self._ranges(name, start, stop)
        return torch.cat([self._stored.read_blocks(self._names[name], *rows) for rows in ranges])

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        """See Checkpoint."""
        info = self._info(name)
        if not 0 <= start <= stop <= info.shape[0]:
            raise ValueError(f"{self.source}: rows [{start}, {stop}) are outside tensor '{name}' of shape {info.shape}")
        parts = [self._stored.read_coded(self._names[name], *rows) for rows in self._ranges(name, start, stop)]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def column_order(self, name: str) -> torch.Tensor | None:
        """See Checkpoint."""
        return self._stored.column_order(self._names[name]) if name in self._names else None

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        ranges = self._ranges(name, start, stop)
        rows = torch.cat([self._stored.read_rows(self._names[name], *each) for each in ranges])
        if self._published:
            out.copy_(rows)
            return
        if _FOLDED.fullmatch(name) and not self._folded:
            rows = rows.float() + 1
        elif self._names[name].endswith(_A_LOG):
            rows = -rows.float().exp()
        out.copy_(rows)

    def _ranges(self, name: str, start: int, stop: int) -> list[tuple[int, int]]:
        pieces = self._pieces.get(name)
        return [(start, stop)] if pieces is None or start == stop else list(pieces.rows(start, stop))

    def _list(self, name: str, info: TensorInfo) -> None:
        """Enters the tensors that one stored tensor holds."""
        own = _of_text(name)
        delta, found = self.config.gated_delta, _INTERLEAVED.fullmatch(own)
        if found is None or delta is None:
            if own.endswith(_A_LOG):
                own, info = own.removesuffix("A_log") + "decay", self._float32(name, info)
            elif _FOLDED.fullmatch(own):
                info = self._float32(name, info)
            self._enter(own, name, info)
            return
        parts = _interleaved(delta, found[2])
        block = next(iter(parts.values())).block
        if len(info.shape) != 2 or info.shape[0] != delta.num_key_heads * block:
            rows = delta.num_key_heads * block
            raise ValueError(f"{self.source}: tensor '{name}' has shape {info.shape}, expected {rows} rows")
        for part, pieces in parts.items():
            full = f"{found[1]}.in_proj_{part}.weight"
            rows = delta.num_key_heads * sum(size for _, size in pieces.parts)
            self._pieces[full] = pieces
            self._enter(full, name, replace(info, shape=(rows, *info.shape[1:])))

    def _enter(self, own: str, name: str, info: TensorInfo) -> None:
        if own in self._names:
            raise ValueError(f"{self.source}: tensors '{self._names[own]}' and '{name}' both are '{own}'")
        self._names[own], self.tensors[own] = name, info

    def _float32(self, name: str, info: TensorInfo) -> TensorInfo:
        """The type of computed values: rounded to bfloat16 they would differ from transformers'."""
        if info.dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"{self.source}: tensor '{name}' has type {info.dtype}, expected a float type")
        return replace(info, dtype="float32")


def named_hybrid(stored: Checkpoint) -> Checkpoint:
    """Returns a checkpoint of a hybrid under the names of this module; any other is returned as it is."""
    return HybridTensors(stored) if stored.config.architecture in HYBRIDS else stored


def _of_text(name: str) -> str:
    """Returns the name that a tensor of a model of text and vision has in one of text alone."""
    return name.replace("model.language_model.", "model.", 1)


def _interleaved(config: GatedDeltaConfig, kind: str) -> dict[str, _Pieces]:
    """Returns where the parts of in_proj_qkvz or in_proj_ba lie."""
    heads, ratio = config.num_key_heads, config.num_value_heads // config.num_key_heads
    if kind == "ba":
        return {"b": _Pieces(heads, 2 * ratio, ((0, ratio),)), "a": _Pieces(heads, 2 * ratio, ((ratio, ratio),))}
    key, value = config.key_head_dim, ratio * config.value_head_dim
    block = 2 * (key + value)
    qkv = _Pieces(heads, block, ((0, key), (key, key), (2 * key, value)))
    return {"qkv": qkv, "z": _Pieces(heads, block, ((2 * key + value, value),))}


def interleaved_rows(config: GatedDeltaConfig, kind: str) -> dict[str, torch.Tensor]:
    """Returns the rows of each part of in_proj_qkvz or in_proj_ba, int64, in the order of the part."""
    found = {}
    for part, pieces in _interleaved(config, kind).items():
        ranges = pieces.rows(0, pieces.heads * sum(size for _, size in pieces.parts))
        found[part] = torch.cat([torch.arange(first, stop) for first, stop in ranges])
    return found


def _joined(parts: list[CodedRows]) -> CodedRows:
    def joined(name: str) -> torch.Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return CodedRows(parts[0].coding, codes, scales, joined("zeros"), joined("minima"))
