"""Checkpoint folders of the Hugging Face layout: safetensors or pytorch_model.bin, whole or in shards."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specengine.models.checkpoint_base import Checkpoint, TensorInfo, copy_rows
from specengine.models.config import ModelConfig
from specengine.models.config_hf import read_model_config
from specengine.models.torch_file import TorchFile
from specengine.utils.json_file import read_json_object

# draft heads also have integer and boolean tables; an unlisted type keeps its name and cannot be read
SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "BOOL": "bool",
}


class _FolderCheckpoint(Checkpoint):
    """Files of tensors in a folder, float64 as float32; `config` is read from config.json on first use."""

    filename: str

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.source = str(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Path] = {}
        for path, names in self._shards().items():
            infos = self._list(path)
            for name in infos if names is None else names:
                if name not in infos:
                    raise ValueError(f"{path}: has no tensor '{name}', which the index places there")
                info = infos[name]
                # kernels have at most 32 bits; transformers would compute with 64
                self.tensors[name] = replace(info, dtype="float32") if info.dtype == "float64" else info
                self._files[name] = path

    @cached_property
    def config(self) -> ModelConfig:  # type: ignore[override]
        return read_model_config(self.folder)

    def _shards(self) -> dict[Path, list[str] | None]:
        """Lists the files and the tensors to read from each; None stands for all tensors."""
        index = self.folder / f"{self.filename}.index.json"
        if not index.is_file():
            return {self.folder / self.filename: None}
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: expected a JSON object with an object 'weight_map'")
        shards: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
                raise ValueError(f"{index}: shard {str(file)[:80]!r} of tensor '{name}' must be a plain file name")
            path = self.folder / file
            if path not in shards and not _is_file(path):
                raise ValueError(f"{index}: shard {file!r} of tensor '{name}' does not exist")
            shards.setdefault(path, []).append(name)
        return dict(shards)

    @abstractmethod
    def _list(self, path: Path) -> dict[str, TensorInfo]:
        """Lists the tensors of one file. Raises ValueError for a damaged file."""


class SafetensorsCheckpoint(_FolderCheckpoint):
    """model.safetensors, or the shards that its index names."""

    filename = "model.safetensors"
    dtypes = SAFETENSORS_DTYPES

    def _list(self, path: Path) -> dict[str, TensorInfo]:
        infos = {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    view = file.get_slice(name)
                    dtype = view.get_dtype()
                    infos[name] = TensorInfo(tuple(view.get_shape()), self.dtypes.get(dtype, dtype))
        except SafetensorError as error:
            raise ValueError(f"{path}: not an intact safetensors file: {error}") from None
        return infos

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        # opened for every read: the pages of a mapping count as memory of the process until it is closed
        with safe_open(self._files[name], framework="pt") as file:
            rows = file.get_slice(name)[start:stop]
        if rows.dtype == out.dtype:
            copy_rows(out, rows)
        else:
            out.copy_(rows)


class TorchBinCheckpoint(_FolderCheckpoint):
    """pytorch_model.bin, or the shards that its index names; pickled code is refused and never run."""

    filename = "pytorch_model.bin"

    def __init__(self, folder: str | Path) -> None:
        self._opened: dict[Path, TorchFile] = {}
        super().__init__(folder)

    def _list(self, path: Path) -> dict[str, TensorInfo]:
        self._opened[path] = TorchFile(path)
        return {name: TensorInfo(each.shape, each.dtype) for name, each in self._opened[path].tensors.items()}

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        out.copy_(self._opened[self._files[name]].rows(name, start, stop))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is not valid on this system
        return False
