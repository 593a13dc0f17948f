"""Files of drafter weights: the layouts that published trainings write, int8 storage, and tensors under other names.

int8 storage: `X.weight` int8 [rows, columns] lies beside `X.weight_scale` float16 [rows, columns / 32]. Both together
are the blocks of GGUF's Q8_0, so codes and scales are kept as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from specengine.models.checkpoint_base import Checkpoint, TensorInfo, copy_rows
from specengine.models.checkpoint_hf import SafetensorsCheckpoint, TorchBinCheckpoint
from specengine.ops.coded.rows import CodedRows

BLOCK = 32  # columns that share a scale


class MedusaHeads(TorchBinCheckpoint):
    """medusa_lm_head.pt, the file that Medusa's own training writes."""

    filename = "medusa_lm_head.pt"


class MedusaSafetensors(SafetensorsCheckpoint):
    """medusa_lm_head.safetensors, the same tensors as model hubs convert them."""

    filename = "medusa_lm_head.safetensors"


class Int8Checkpoint(Checkpoint):
    """The tensors of some files, with weights in int8 storage as tensors of type Q8_0.

    Raises ValueError for an int8 tensor without its scale, and for a scale without its tensor.
    """

    def __init__(self, files: Checkpoint) -> None:
        self.source = files.source
        self._files = files
        scales = {name for name in files.tensors if name.endswith(".weight_scale")}
        self.tensors = {name: self._listed(name) for name in files.tensors if name not in scales}
        for name in scales:
            weight = self.tensors.get(name.removesuffix("_scale"))
            if weight is None or weight.dtype != "Q8_0":
                raise self.error(f"tensor '{name}' belongs to no int8 weight")

    def _listed(self, name: str) -> TensorInfo:
        info = self._files.tensors[name]
        if info.dtype != "int8":
            return info
        wanted = (*info.shape[:-1], *(columns // BLOCK for columns in info.shape[-1:]))
        scale = self._files.tensors.get(f"{name}_scale")
        if len(info.shape) != 2 or info.shape[1] % BLOCK or scale != TensorInfo(wanted, "float16"):
            raise self.error(
                f"int8 tensor '{name}' of shape {info.shape} needs columns in blocks of {BLOCK} and "
                f"'{name}_scale' of float16 {wanted}"
            )
        return TensorInfo(info.shape, "Q8_0")

    def error(self, problem: str) -> ValueError:
        """Makes a ValueError that names the checkpoint."""
        return ValueError(f"{self.source}: {problem}")

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Checkpoint."""
        if self._info(name).dtype != "Q8_0":
            return super().read_blocks(name, start, stop)
        codes = self._files.read_rows(name, start, stop)
        scale = self._files.read_rows(f"{name}_scale", start, stop)
        rows, blocks = scale.shape
        stored = np.empty((rows, blocks, 2 + BLOCK), np.uint8)
        stored[:, :, :2] = scale.view(torch.uint8).view(rows, blocks, 2).numpy()
        stored[:, :, 2:] = codes.view(torch.uint8).view(rows, blocks, BLOCK).numpy()
        return torch.from_numpy(stored).view(rows, -1)

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        rows = self._files.read_rows(name, start, stop)
        if self.tensors[name].dtype == "Q8_0":
            scale = self._files.read_rows(f"{name}_scale", start, stop).float()
            rows = (rows.view(*scale.shape, BLOCK) * scale[..., None]).view(rows.shape)
        out.copy_(rows)


class RenamedCheckpoint(Checkpoint):
    """The tensors of some files under other names. names: new name -> name in the files."""

    def __init__(self, files: Checkpoint, names: Mapping[str, str]) -> None:
        self.source = files.source
        self._files = files
        self._names = names
        self.tensors = {name: files.tensors[stored] for name, stored in names.items()}

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Checkpoint."""
        self._info(name)
        return self._files.read_blocks(self._names[name], start, stop)

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        """See Checkpoint."""
        self._info(name)
        return self._files.read_coded(self._names[name], start, stop)

    def column_order(self, name: str) -> torch.Tensor | None:
        """See Checkpoint."""
        return self._files.column_order(self._names[name]) if name in self._names else None

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        copy_rows(out, self._files.read_rows(self._names[name], start, stop))


def open_draft_files(folder: Path) -> Checkpoint:
    """Opens the weights in a drafter's folder. Raises FileNotFoundError for a folder without weights."""
    for kind in (SafetensorsCheckpoint, TorchBinCheckpoint, MedusaSafetensors, MedusaHeads):
        if any((folder / f"{kind.filename}{suffix}").is_file() for suffix in (".index.json", "")):
            return kind(folder)
    raise FileNotFoundError(f"{folder}: holds none of model.safetensors, pytorch_model.bin, medusa_lm_head.*")
