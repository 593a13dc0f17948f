"""Checkpoints of drafters: folders of tensors under names of their own, with or without a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint_base import Checkpoint
from specengine.models.config import ModelConfig, check_layers
from specengine.models.config_hf import check_activation, head_size, rope_config
from specengine.models.draft_files import Int8Checkpoint, open_draft_files
from specengine.models.hidden_states import eagle3_layers
from specengine.models.renamed import RenamedCheckpoint
from specengine.utils.json_fields import Fields
from specengine.utils.json_file import read_json_object
from specengine.utils.model_files import is_gguf

# the defaults of the code that published the first EAGLE checkpoints
DEFAULT_EPS, DEFAULT_POSITIONS = 1e-6, 2048
# objects of config.json whose fields count as its own: of the speculators library, and of converted checkpoints
_NESTED = ("eagle_config", "transformer_layer_config")


class DraftCheckpoint(Int8Checkpoint):
    """Tensors of a drafter, and the facts in its config.json.

    json: config.json as a dict, {} where the folder has none; fields of nested objects that only group are lifted.
    """

    drafts = True

    def __init__(self, files: Checkpoint, json: Mapping[str, Any]) -> None:
        super().__init__(files)
        self.json: dict[str, Any] = dict(json)
        for name in _NESTED:
            nested = json.get(name)
            if isinstance(nested, Mapping):
                self.json |= {key: value for key, value in nested.items() if value is not None}

    def renamed(self, change: Callable[[str], str]) -> DraftCheckpoint:
        """Returns the same checkpoint with each tensor named change(name).

        Raises ValueError where two tensors would have one name.
        """
        names = {change(name): name for name in self._files.tensors}
        if len(names) < len(self._files.tensors):
            raise self.error("holds tensors under the names of two layouts at once")
        return DraftCheckpoint(RenamedCheckpoint(self._files, names), self.json)

    def expect(self, name: str, *shape: int) -> None:
        """Raises ValueError where a tensor is missing or has another shape."""
        if name not in self.tensors:
            raise self.error(f"tensor '{name}' is missing")
        if self.tensors[name].shape != shape:
            raise self.error(f"tensor '{name}' has shape {self.tensors[name].shape}, expected {shape}")

    def expect_all(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Calls expect() for every name."""
        for name, shape in shapes.items():
            self.expect(name, *shape)

    def rows(self, name: str) -> int:
        """Counts the rows of a matrix. Raises ValueError where it is missing, empty or has not two dimensions."""
        shape = self.tensors[name].shape if name in self.tensors else None
        if shape is None or len(shape) != 2 or 0 in shape:
            found = "is missing" if shape is None else f"has shape {shape}, expected [rows, columns]"
            raise self.error(f"tensor '{name}' {found}")
        return shape[0]

    @property
    def fields(self) -> Fields:
        """Typed access to `json`."""
        one_file = is_gguf(Path(self.source))
        return Fields(self.json, str(self.source) if one_file else f"{self.source}/config.json")

    @property
    def config(self) -> ModelConfig:  # type: ignore[override]
        return self.layer_config()

    def layer_config(self, num_layers: int | None = None) -> ModelConfig:
        """Reads the shape of the drafter's layers from its own config.json, never from the target's.

        A missing rotary base is 10000, whatever the target has: published drafters were trained so. The layers have the
        biases and q/k norms that have tensors. Raises ValueError naming the wrong field.
        """
        fields = self.fields
        check_activation(fields)
        hidden_size = fields.get("hidden_size", int)
        num_heads = fields.get("num_attention_heads", int)
        head_dim = head_size(fields)
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
            head_dim=head_dim,
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
        """Positions that its attention sees: at most as many as in training, where config.json gives that number.

        Raises ValueError naming the wrong field.
        """
        most = self.config.max_position
        trained = self.fields.get("trained_length", int, most)
        if trained < 1:
            raise self.fields.error("trained_length", f"must be positive, got {trained}")
        return min(most, trained)

    def hidden_state_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """Layers of the target whose input the drafter reads; eagle3_layers() where config.json names none.

        Raises ValueError for a target with too few layers or another hidden size.
        """
        wanted = self.fields.get("target_hidden_size", int, self.fields.get("hidden_size", int))
        if wanted != target.hidden_size:
            raise self.error(f"it reads a target of hidden size {wanted}, this one has {target.hidden_size}")
        count = target.num_layers
        layers = self.fields.ids("eagle_aux_hidden_state_layer_ids") or eagle3_layers(count)
        if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= count:
            raise self.error(f"it reads the target's layers {layers}, expected rising numbers up to {count}")
        return layers

    def vocabulary(self, target: ModelConfig) -> torch.Tensor | None:
        """Returns the target's token of each draft token, int64 [Vd]; None where both vocabularies are the same.

        Tensor `d2t` holds the target's token minus the draft token. Raises ValueError for tokens the target lacks.
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


def open_draft_checkpoint(path: str | Path) -> DraftCheckpoint:
    """Opens a drafter: a folder with model.safetensors, pytorch_model.bin or medusa_lm_head.pt, or a hub name.

    Raises FileNotFoundError for a missing file, ModelFetchError for a failed fetch, ValueError for other faults.
    """
    try:
        folder = Path(path) if Path(path).is_dir() else resolve_model(path)
        if not isinstance(folder, Path) or not folder.is_dir():
            raise ValueError(f"{path}: expected a folder of a drafter's weights")
        config = folder / "config.json"
        return DraftCheckpoint(open_draft_files(folder), read_json_object(config) if config.is_file() else {})
    except (FileNotFoundError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"drafter: {error}") from error
