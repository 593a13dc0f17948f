"""GGUF files of architecture `dflash`, as llama.cpp's converter writes them, under the names that folders have.

Layers of the target are numbered by their inputs, and d2t holds tokens of the target, not differences. Norms are stored
as they are. Quantised tensors are read as floats.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from specengine.models.checkpoint_base import BLOCK_TYPES, Checkpoint, TensorInfo
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.gguf_fields import GGUFFields
from specengine.models.gguf_file import GGUFFile
from specengine.models.gguf_names import hf_name
from specengine.models.gguf_types import block_values

ARCHITECTURE = "dflash"
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64"}
_NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "d2t": "d2t",
    "d2t.weight": "d2t",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
_CONVOLUTIONS = {"base": "base_kernel", "proj": "kernel_projection.weight"}
# Key of the file, without its architecture -> key of config.json and its type.
_KEYS: dict[str, tuple[str, type]] = {
    "embedding_length": ("hidden_size", int),
    "feed_forward_length": ("intermediate_size", int),
    "block_count": ("num_hidden_layers", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.key_length": ("head_dim", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "attention.sliding_window": ("sliding_window", int),
    "rope.freq_base": ("rope_theta", float),
    "context_length": ("max_position_embeddings", int),
    "sample_from_anchor": ("sample_from_anchor", bool),
    "has_confidence_head": ("enable_confidence_head", bool),
    "conv_kernel_size": ("conv_kernel_size", int),
    "conv_group_size": ("conv_group_size", int),
    "selector_rank": ("selector_rank", int),
    "selector_top_k": ("selector_top_k", int),
    "logit_scale": ("output_multiplier", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
}


def open_gguf(path: Path) -> DraftCheckpoint:
    """Opens a file. Raises ValueError, naming the key or tensor, for a damaged one and for another architecture."""
    try:
        file = GGUFFile(path)
        tensors = _Tensors(file)
        return DraftCheckpoint(tensors, _json(GGUFFields(file.metadata, str(path)), tensors))
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"drafter: {error}") from error


class _Tensors(Checkpoint):
    """The tensors of a file under the names of folders."""

    def __init__(self, file: GGUFFile) -> None:
        self.source, self._file = str(file.path), file
        self._stored = {_name(stored): stored for stored in file.tensors}
        self.tensors = {name: self._listed(stored) for name, stored in self._stored.items()}

    def _listed(self, stored: str) -> TensorInfo:
        tensor = self._file.tensors[stored]
        kind, shape = tensor.type.name, tensor.shape
        if kind not in _TYPES and not (kind in BLOCK_TYPES and len(shape) == 2):
            supported = ", ".join((*_TYPES, *BLOCK_TYPES))
            raise ValueError(f"{self.source}: tensor '{stored}' has type {kind}; supported are {supported}")
        if stored == "conf_proj.weight" and len(shape) == 1:
            shape = (1, *shape)
        return TensorInfo(shape, _TYPES.get(kind, "float32"))

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        stored = self._stored[name]
        tensor = self._file.tensors[stored]
        if len(tensor.shape) == 3:  # its rows are matrices
            start, stop = start * tensor.shape[1], stop * tensor.shape[1]
        elif len(tensor.shape) < len(self.tensors[name].shape):
            start, stop = 0, tensor.shape[0]
        data = self._file.read_rows(stored, start, stop)
        if tensor.type.name in _TYPES:
            values = torch.from_numpy(data).view(getattr(torch, _TYPES[tensor.type.name])).view(out.shape)
        else:
            values = block_values(data, tensor.type).view(out.shape)
        out.copy_(values - torch.arange(start, stop) if name == "d2t" else values)


def _name(stored: str) -> str:
    """Returns the name in a folder; an unknown name is unchanged."""
    if convolution := re.fullmatch(r"blk\.(\d+)\.(attn|ffn)_conv_(base|proj)(\.weight)?", stored):
        around = "attention" if convolution[2] == "attn" else "mlp"
        return f"layers.{convolution[1]}.{around}_conv.{_CONVOLUTIONS[convolution[3]]}"
    return _NAMES.get(stored) or hf_name(stored)


def _json(fields: GGUFFields, tensors: _Tensors) -> dict[str, Any]:
    """Returns the config.json of a folder with the same facts."""
    arch = fields.get("general.architecture", str)
    if arch != ARCHITECTURE:
        raise fields.error("general.architecture", f"must be {ARCHITECTURE}, got {arch!r}")
    if fields.get(f"{arch}.rope.scaling.type", str, "none") != "none":
        raise fields.error(f"{arch}.rope.scaling.type", "is not supported in a block drafter")
    size = fields.get(f"{arch}.attention.key_length", int, None)
    for key in ("attention.value_length", "rope.dimension_count"):
        if size is not None and (own := fields.get(f"{arch}.{key}", int, size)) != size:
            raise fields.error(f"{arch}.{key}", f"is {own}, must be attention.key_length, which is {size}")
    found: dict[str, Any] = {"block_size": fields.get(f"{arch}.block_size", int, 16)}
    for key, (name, kind) in _KEYS.items():
        value: Any = fields.get(f"{arch}.{key}", kind, None)
        if value is not None:
            found[name] = value
    found["mask_token_id"] = fields.get("tokenizer.ggml.mask_token_id", int)
    found["vocab_size"] = fields.get(f"{arch}.vocab_size", int, len(fields.get("tokenizer.ggml.tokens", list, [])))
    found["target_layer_ids"] = [layer - 1 for layer in fields.ids(f"{arch}.target_layers")]
    found["is_causal"] = fields.get(f"{arch}.attention.causal", bool, False)
    pattern = fields.get(f"{arch}.attention.sliding_window_pattern", list, None)
    if pattern is not None:
        found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif found.pop("sliding_window", 0):
        raise fields.error(f"{arch}.attention.sliding_window_pattern", "is missing beside a window")
    if any(name.startswith(("markov_head.", "confidence_head.")) for name in tensors.tensors):
        rows = tensors.tensors.get("markov_head.markov_w1.weight")
        found["markov_rank"] = rows.shape[-1] if rows else 0
    elif found.get("sample_from_anchor"):
        found["markov_rank"] = 0
    return found
