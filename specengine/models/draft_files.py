"""Files of drafter weights: the layouts that published trainings write, int8 storage, packed weights.

int8 storage: `X.weight` int8 [rows, columns] lies beside `X.weight_scale` float16 [rows, columns / 32]. Both together
are the blocks of GGUF's Q8_0, so codes and scales are kept as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from specengine.hub.catalog import EMBEDDED
from specengine.models.checkpoint_base import Checkpoint, TensorInfo, copy_rows
from specengine.models.checkpoint_hf import SafetensorsCheckpoint, TorchBinCheckpoint
from specengine.models.quantised.packed_weights import FILENAME, like, unpack
from specengine.utils.kept_tensors import kept_tensors

BLOCK = 32  # columns that share a scale


def int8_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts matrices to int8 storage, symmetric; other floats and matrices of other widths become bfloat16."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            out[name] = tensor.contiguous()
        elif tensor.ndim == 2 and tensor.shape[1] % BLOCK == 0:
            out[name], out[f"{name}_scale"] = _int8(tensor.float())
        else:
            out[name] = tensor.to(torch.bfloat16).contiguous()
    return out


def _int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = matrix.unflatten(1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1) / 127).to(torch.float16)
    # codes fit the scale as stored; a block too small for float16 becomes zero
    codes = (blocks / scale.float().clamp(min=1e-7)[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(1), scale


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


class TensorsCheckpoint(Checkpoint):
    """Tensors in memory. source: where they came from."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        self.source = source
        self._read = tensors
        self.tensors = {
            name: TensorInfo(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()
        }

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        copy_rows(out, self._read[name][start:stop])


class Bases:
    """The matrices that packed weights of a folder may be differences from.

    A source is an embedded model, or `../NAME`: the drafter in a folder beside this one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, Checkpoint] = {}

    def digest(self, source: str) -> str:
        """Computes the digest of a source's file. Raises ValueError for other sources, and where there is no file."""
        if source in EMBEDDED:
            return EMBEDDED[source].gguf_sha256
        if source != f"../{Path(source).name}" or source == "../..":
            raise ValueError(f"base: expected {' or '.join(EMBEDDED)} or ../NAME, got {source!r}")
        for name in (SafetensorsCheckpoint.filename, FILENAME):
            if (file := self._folder / source / name).is_file():
                return _digest(file)
        raise ValueError(f"base: {source} has neither {SafetensorsCheckpoint.filename} nor {FILENAME}")

    def open(self, source: str) -> Checkpoint:
        """Opens a source; ModelFetchError where an embedded model cannot be fetched."""
        if source not in self._opened:
            if source in EMBEDDED:
                # only GGUF files need the gguf package
                from specengine.hub.embedded_models import fetch_embedded
                from specengine.models.checkpoint_gguf import GGUFCheckpoint

                self._opened[source] = GGUFCheckpoint(fetch_embedded(source))
            else:
                self._opened[source] = Int8Checkpoint(open_draft_files(self._folder / source))
        return self._opened[source]

    def read(self, source: str, name: str, shape: torch.Size, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Reads a base, float32 [R, C].

        tokens: int64 [R], those of the drafter's vocabulary. A base with a vocabulary of its own gives its row of each
        token, zeros of tokens that it lacks.
        """
        checkpoint = self.open(source)
        base = checkpoint.read(name).float()
        if tokens is None or "d2t" not in checkpoint.tensors or len(tokens) != shape[0]:
            return like(base, shape)
        theirs = checkpoint.read("d2t")
        if len(theirs) != len(base):
            return like(base, shape)
        known, row = (theirs + torch.arange(len(theirs))).sort()
        place = torch.searchsorted(known, tokens).clamp(max=len(known) - 1)
        return like(base[row[place]] * (known[place] == tokens)[:, None], shape)


def _unpacked(folder: Path) -> Checkpoint:
    bases = Bases(folder)
    path = folder / FILENAME
    tensors = kept_tensors(_digest(path), lambda: int8_tensors(unpack(path, bases.digest, bases.read)))
    return TensorsCheckpoint(tensors, str(folder))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def open_draft_files(folder: Path) -> Checkpoint:
    """Opens the weights in a drafter's folder. Raises FileNotFoundError for a folder without weights."""
    for kind in (SafetensorsCheckpoint, TorchBinCheckpoint, MedusaSafetensors, MedusaHeads):
        if any((folder / f"{kind.filename}{suffix}").is_file() for suffix in (".index.json", "")):
            return kind(folder)
    if (folder / FILENAME).is_file():  # the last: a training run replaces other weights by it when it is whole
        return _unpacked(folder)
    raise FileNotFoundError(f"{folder}: holds none of model.safetensors, pytorch_model.bin, medusa_lm_head.*")
