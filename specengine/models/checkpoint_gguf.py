"""GGUF checkpoints: reads a llama.cpp file under Hugging Face names, in their row order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from specengine.models.checkpoint_base import BLOCK_TYPES, Checkpoint, TensorInfo
from specengine.models.config_gguf import config_from_gguf
from specengine.models.gguf_file import GGUFFile
from specengine.ops.weight import FLOAT_FORMATS

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_FREQS = "rope_freqs.weight"
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint(Checkpoint):
    """One GGUF file; `file` gives access to its header."""

    step_bytes = 2 << 20  # dequantisation needs several times the memory of its result

    def __init__(self, path: str | Path) -> None:
        self.source = str(path)
        self.file = GGUFFile(path)
        self.metadata = self.file.metadata
        self._stored = {hf_name(name): name for name in self.file.tensors if name != _ROPE_FREQS}
        self.tensors = {name: self._describe(stored) for name, stored in self._stored.items()}
        shapes = {name: tensor.shape for name, tensor in self.file.tensors.items()}
        self.config = config_from_gguf(self.file.metadata, shapes, self._rope_freqs(), self.source)

    def _describe(self, stored: str) -> TensorInfo:
        tensor = self.file.tensors[stored]
        kind = tensor.type.name
        if kind not in _FLOATS and not (kind in BLOCK_TYPES and len(tensor.shape) > 1):
            supported = ", ".join((*_FLOATS, *BLOCK_TYPES))
            raise ValueError(f"{self.source}: tensor '{stored}' has type {kind}; supported are {supported}")
        return TensorInfo(tensor.shape, _FLOATS.get(kind, kind))

    def _rope_freqs(self) -> list[float]:
        tensor = self.file.tensors.get(_ROPE_FREQS)
        if tensor is None:
            return []
        if tensor.type != GGMLQuantizationType.F32 or len(tensor.shape) != 1:
            raise ValueError(f"{self.source}: tensor '{_ROPE_FREQS}' must be a vector of type F32")
        return self.file.read_rows(_ROPE_FREQS, 0, tensor.shape[0]).view("<f4").ravel().tolist()

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(self._stored_bytes(name, start, stop))

    def _stored_bytes(self, name: str, start: int, stop: int) -> np.ndarray:
        rows = self._stored_rows(name, start, stop)
        first = int(rows.min())
        return self.file.read_rows(self._stored[name], first, int(rows.max()) + 1)[rows - first]

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        data = self._stored_bytes(name, start, stop)
        kind = self.file.tensors[self._stored[name]].type
        if kind.name in _FLOATS:
            out.copy_(torch.from_numpy(data).view(FLOAT_FORMATS[_FLOATS[kind.name]]).view(out.shape))
        else:
            out.copy_(torch.from_numpy(quants.dequantize(data, kind)).view(out.shape))

    def _stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns the places of rows [start, stop) in the file.

        Files of architecture llama hold each head of q and k with its two rotary halves interleaved:
        row j of half h is stored as row 2 j + h.
        """
        rows = np.arange(start, stop)
        if self.config.architecture != "llama" or not re.search(r"\.[qk]_proj\.", name):
            return rows
        dim = self.config.head_dim
        head, inner = np.divmod(rows, dim)
        half, j = np.divmod(inner, dim // 2)
        return head * dim + 2 * j + half


def hf_name(name: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor of a LLaMA-shaped model; an unknown name is unchanged."""
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else name
