"""Checkpoints of drafters: folders of tensors under names of their own, with or without a config.json.

int8 storage: beside `X.weight` int8 [rows, columns] lies `X.weight_scale` float16 [rows, columns / 32]; they are
the blocks of GGUF's Q8_0, so that codes and scales are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint_base import Checkpoint, TensorInfo
from specengine.models.checkpoint_files import SafetensorsCheckpoint, TorchBinCheckpoint
from specengine.models.config_base import ModelConfig, check_layers
from specengine.models.config_hf import rope_config
from specengine.utils.json_fields import Fields
from specengine.utils.json_file import read_json_object

BLOCK = 32  # columns that share a scale
DEFAULT_EPS, DEFAULT_POSITIONS = 1e-6, 2048  # of the code that published the first of these checkpoints
# objects of config.json whose fields count as its own: of the speculators library, and of converted checkpoints
_NESTED = ("eagle_config", "transformer_layer_config")


class MedusaHeads(TorchBinCheckpoint):
    """medusa_lm_head.pt, the file that Medusa's own training writes."""

    filename = "medusa_lm_head.pt"


class MedusaSafetensors(SafetensorsCheckpoint):
    """The same as safetensors, as model hubs converted it."""

    filename = "medusa_lm_head.safetensors"


class DraftCheckpoint(Checkpoint):
    """Tensors of a drafter, and what its config.json says.

    json: config.json as a dict, {} where there is none; fields of objects that only group others are lifted.
    """

    def __init__(self, files: Checkpoint, json: Mapping[str, Any]) -> None:
        self.source, self._files = files.source, files
        self.json: dict[str, Any] = dict(json)
        for name in _NESTED:
            nested = json.get(name)
            if isinstance(nested, Mapping):
                self.json |= {key: value for key, value in nested.items() if value is not None}
        scales = {name for name in files.tensors if name.endswith(".weight_scale")}
        self.tensors = {name: self._listed(name) for name in files.tensors if name not in scales}
        for name in scales:
            weight = self.tensors.get(name.removesuffix("_scale"))
            if weight is None or weight.dtype != "Q8_0":
                raise self.error(f"tensor '{name}' belongs to no int8 weight")

    def _listed(self, name: str) -> TensorInfo:
        info = self._files.tensors[name]
        if info.dtype == "int8":
            wanted = (*info.shape[:-1], *(columns // BLOCK for columns in info.shape[-1:]))
            scale = self._files.tensors.get(f"{name}_scale")
            if len(info.shape) != 2 or info.shape[1] % BLOCK or scale != TensorInfo(wanted, "float16"):
                raise self.error(
                    f"int8 tensor '{name}' of shape {info.shape} needs columns in blocks of {BLOCK} and "
                    f"'{name}_scale' of float16 {wanted}"
                )
            return TensorInfo(info.shape, "Q8_0")
        return info

    def renamed(self, change: Callable[[str], str]) -> DraftCheckpoint:
        """The same checkpoint under other names: change(name) of each. Raises ValueError where two become one."""
        names = {change(name): name for name in self._files.tensors}
        if len(names) < len(self._files.tensors):
            raise self.error("holds tensors under the names of two layouts at once")
        return DraftCheckpoint(_Renamed(self._files, names), self.json)

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.source}: {problem}")

    def expect(self, name: str, *shape: int) -> None:
        """Raises ValueError where a tensor is missing or has another shape."""
        if name not in self.tensors:
            raise self.error(f"tensor '{name}' is missing")
        if self.tensors[name].shape != shape:
            raise self.error(f"tensor '{name}' has shape {self.tensors[name].shape}, expected {shape}")

    def expect_all(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """expect() of every one."""
        for name, shape in shapes.items():
            self.expect(name, *shape)

    def rows(self, name: str) -> int:
        """Rows of a matrix. Raises ValueError where it is missing, no matrix or empty."""
        shape = self.tensors[name].shape if name in self.tensors else None
        if shape is None or len(shape) != 2 or 0 in shape:
            found = "is missing" if shape is None else f"has shape {shape}, expected [rows, columns]"
            raise self.error(f"tensor '{name}' {found}")
        return shape[0]

    @property
    def fields(self) -> Fields:
        """Typed access to `json`."""
        return Fields(self.json, f"{self.source}/config.json")

    @property
    def config(self) -> ModelConfig:  # type: ignore[override]
        return self.layer_config()

    def layer_config(self, num_layers: int | None = None) -> ModelConfig:
        """The drafter's own layers by its own config.json, never by the target's.

        A rotary base that is not given is 10000, whatever the target has: published drafters were trained so. Biases
        and q/k norms are where there are tensors of them. Raises ValueError naming the field that is wrong.
        """
        fields = self.fields
        if fields.get("hidden_act", str, "silu") not in ("silu", "swish"):
            raise fields.error("hidden_act", f"must be 'silu', got {self.json['hidden_act']!r}")
        hidden_size, num_heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
        head_dim = fields.get("head_dim", int, None)
        if head_dim is None and (num_heads <= 0 or hidden_size % num_heads):
            raise fields.error("hidden_size", f"must be a multiple of num_attention_heads {num_heads}")
        max_position = fields.get("max_position_embeddings", int, DEFAULT_POSITIONS)
        return fields.build(
            ModelConfig,
            architecture="llama",
            vocab_size=fields.get("vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=fields.get("intermediate_size", int),
            num_layers=fields.build(check_layers, num_layers=num_layers or fields.get("num_hidden_layers", int, 1)),
            num_heads=num_heads,
            num_kv_heads=fields.get("num_key_value_heads", int, num_heads),
            head_dim=head_dim or hidden_size // num_heads,
            rms_norm_eps=fields.get("rms_norm_eps", float, DEFAULT_EPS),
            max_position=max_position,
            rope=rope_config(fields, max_position),
            qkv_bias=self._any(".q_proj.bias"),
            output_bias=self._any(".o_proj.bias"),
            mlp_bias=self._any(".down_proj.bias"),
            qk_norm=self._any(".q_norm.weight"),
        )

    @property
    def attention_reach(self) -> int:
        """Positions that its attention sees: no more than in training, where config.json says how many those were.

        Raises ValueError naming the field that is wrong.
        """
        most = self.config.max_position
        trained = self.fields.get("trained_length", int, most)
        if trained < 1:
            raise self.fields.error("trained_length", f"must be positive, got {trained}")
        return min(most, trained)

    def feature_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """Layers of the target whose input it reads; not given: low, middle and high, as EAGLE-3 was published.

        Raises ValueError where the target is too shallow or of another size than the drafter reads.
        """
        wanted = self.fields.get("target_hidden_size", int, self.fields.get("hidden_size", int))
        if wanted != target.hidden_size:
            raise self.error(f"it reads a target of hidden size {wanted}, this one has {target.hidden_size}")
        layers = target.num_layers
        hidden_state_layers = self.fields.ids("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
        if (
            list(hidden_state_layers) != sorted(set(hidden_state_layers))
            or not 0 <= hidden_state_layers[0] <= hidden_state_layers[-1] <= layers
        ):
            raise self.error(
                f"it reads the target's layers {hidden_state_layers}, expected rising numbers up to {layers}"
            )
        return hidden_state_layers

    def vocabulary(self, target: ModelConfig) -> torch.Tensor | None:
        """int64 [Vd], the target's token of each of the drafter's, from `d2t`, which holds the difference of both.

        None: its tokens are the target's. Raises ValueError where the target has fewer.
        """
        if "d2t" not in self.tensors:
            return None
        shape = self.tensors["d2t"].shape
        if len(shape) != 1 or not shape[0]:
            raise self.error(f"tensor 'd2t' has shape {shape}, expected one difference per draft token")
        tokens = torch.arange(*shape) + self.read("d2t").long()
        if tokens.unique().numel() != len(tokens):
            raise self.error("tensor 'd2t' leads to a target token twice")
        outside = tokens[(tokens < 0) | (tokens >= target.vocab_size)]
        if len(outside):
            raise self.error(f"tensor 'd2t' leads to token {outside.max()}, the target has {target.vocab_size}")
        return tokens

    def _any(self, ending: str) -> bool:
        return any(name.endswith(ending) for name in self.tensors)

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Checkpoint."""
        if self._info(name).dtype != "Q8_0":
            return super().read_blocks(name, start, stop)
        codes, scale = (self._files.read_rows(each, start, stop) for each in (name, f"{name}_scale"))
        rows, blocks = scale.shape
        parts = (scale.view(torch.uint8).view(rows, blocks, 2), codes.view(torch.uint8).view(rows, blocks, BLOCK))
        return torch.cat(parts, dim=2).view(rows, -1)

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        rows = self._files.read_rows(name, start, stop)
        if self.tensors[name].dtype == "Q8_0":
            scale = self._files.read_rows(f"{name}_scale", start, stop).float()
            rows = (rows.view(*scale.shape, BLOCK) * scale[..., None]).view(rows.shape)
        out.copy_(rows)


class _Renamed(Checkpoint):
    """Tensors under other names; names: those of here to those of the files."""

    def __init__(self, files: Checkpoint, names: Mapping[str, str]) -> None:
        self.source, self._files, self._names = files.source, files, names
        self.tensors = {name: files.tensors[stored] for name, stored in names.items()}

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        out.copy_(self._files.read_rows(self._names[name], start, stop))


def open_draft_checkpoint(path: str | Path) -> DraftCheckpoint:
    """Opens a drafter: a folder with model.safetensors, pytorch_model.bin or medusa_lm_head.pt, or the hub name of one.

    Raises FileNotFoundError for what is missing, ValueError for anything else that is wrong, ModelFetchError.
    """
    try:
        folder = Path(path) if Path(path).is_dir() else resolve_model(path)
        if not isinstance(folder, Path) or not folder.is_dir():
            raise ValueError(f"{path}: expected a folder of a drafter's weights")
        config = folder / "config.json"
        return DraftCheckpoint(_files(folder), read_json_object(config) if config.is_file() else {})
    except (FileNotFoundError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"drafter: {error}") from error


def _files(folder: Path) -> Checkpoint:
    for kind in (SafetensorsCheckpoint, TorchBinCheckpoint, MedusaSafetensors, MedusaHeads):
        if any((folder / f"{kind.filename}{suffix}").is_file() for suffix in (".index.json", "")):
            return kind(folder)
    raise FileNotFoundError(f"{folder}: holds none of model.safetensors, pytorch_model.bin, medusa_lm_head.*")
