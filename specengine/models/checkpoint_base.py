"""The checkpoint interface: named tensors read by rows, and the tensors a model must have."""

from __future__ import annotations

import math
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specengine.models.config import ModelConfig, MoeConfig
from specengine.ops.coded.rows import CodedRows, Coding
from specengine.ops.weight import FLOAT_FORMATS
from specengine.utils.gated_delta_config import GatedDeltaConfig

CPU = torch.device("cpu")
# buffers of rotary tables that older versions of transformers saved, and those of other programs
ROTARY = r"rotary_emb\.\w*(inv_freq|cos_cached|sin_cached)"
# what a folder may have beside its model: rotary tables, static scales of caches, the head of values of TRL
NOT_READ = re.compile(rf"(.*\.)?{ROTARY}|.*\.self_attn\.(\w+\.)?([kvq]|kv|prob)_(scale|zero_point)|v_head\..*")
ENDS = ("model.embed_tokens.weight", "lm_head.weight")  # tensors that drafters may share with their target
# GGUF types that are read as float32; gguf_codes has those with a coding
BLOCK_TYPES = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"),
)


@dataclass(frozen=True)
class TensorInfo:
    """Shape and storage type of a tensor: a torch name ("bfloat16") or a GGUF block type ("Q4_0").

    coding: how a weight is coded that `read_coded` reads; None for others. Its dtype is "float32", that of its values.
    """

    shape: tuple[int, ...]
    dtype: str
    coding: Coding | None = None


class Checkpoint(ABC):
    """Weights of one model under their Hugging Face names, read a few rows at a time.

    No file stays mapped or cached between calls: a loader that converts tensor by tensor needs little extra memory.

    source: path or name, for messages.  metadata: of a GGUF file, which includes the tokenizer; None for others.
    drafts: whether a target verifies what the weights predict, so that int4 may reach the head too.
    """

    source: str
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any] | None = None
    drafts: bool = False

    # bytes of result per step; mapped pages and blocks of a step take about as much again
    step_bytes = 4 << 20

    def read(self, name: str) -> torch.Tensor:
        """Reads the whole tensor; see `read_rows`."""
        return self.read_rows(name, 0, self._info(name).shape[0])

    def read_rows(self, name: str, start: int, stop: int, device: torch.device = CPU) -> torch.Tensor:
        """Reads rows [start, stop) of a tensor (elements of a vector) into a new contiguous tensor.

        The dtype is the tensor's own; quantised blocks become float32.
        Raises ValueError for an unknown name or rows outside the tensor.
        """
        info = self._info(name)
        if not 0 <= start <= stop <= info.shape[0]:
            raise ValueError(f"{self.source}: rows [{start}, {stop}) are outside tensor '{name}' of shape {info.shape}")
        dtype = torch.float32 if info.dtype in BLOCK_TYPES else getattr(torch, info.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.source}: tensor '{name}' has type {info.dtype}, which is not supported")
        rows = _empty((stop - start, *info.shape[1:]), dtype)
        step = max(1, self.step_bytes * (stop - start) // max(1, rows.nbytes))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            self._fill_rows(rows[first - start : last - start], name, first, last)
        return rows.to(device)

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads rows [start, stop) of a quantised tensor as stored: uint8 [stop - start, row_bytes].

        Raises ValueError for a tensor without quantised blocks.
        """
        raise ValueError(f"{self.source}: tensor '{name}' has no quantised blocks")

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        """Reads rows [start, stop) of a tensor that has a coding, in the order of `column_order`.

        Raises ValueError for a tensor without one.
        """
        raise ValueError(f"{self.source}: tensor '{name}' has no codes")

    def column_order(self, name: str) -> torch.Tensor | None:
        """Returns the order of a coded tensor's columns, int64 [C]: column i of `read_coded` is column order[i].

        None: as they are.
        """
        return None

    @abstractmethod
    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        """Writes rows [start, stop) of a tensor to `out`, which has their shape and dtype."""

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ValueError(f"{self.source}: has no tensor '{name}'")
        if not self.tensors[name].shape:
            raise ValueError(f"{self.source}: tensor '{name}' is a scalar, expected at least one dimension")
        return self.tensors[name]


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Makes a new tensor; a large one has pages of its own, which the system takes back when it is freed.

    The heap would keep them: a small object in the hole of a freed block makes the next large one extend the heap.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < 1 << 20:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def copy_rows(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies rows of one dtype on one thread: torch's threads wait for each other longer than such a copy takes."""
    np.copyto(out.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy())


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Lists names and shapes of every tensor of a model, in order of use; linear weights are [out, in]."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= layer_tensors(
            config, f"model.layers.{layer}.", config.layer_moe(layer), config.layer_gated_delta(layer)
        )
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def layer_tensors(
    config: ModelConfig, prefix: str, moe: MoeConfig | None = None, delta: GatedDeltaConfig | None = None
) -> dict[str, tuple[int, ...]]:
    """Lists names and shapes of one decoder layer's tensors.

    moe: its experts, in place of the MLP.  delta: its gated delta rule, in place of attention.
    """
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gated = 2 if config.attention_gate else 1
    linears = {
        "self_attn.q_proj": (gated * queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
    }
    if delta is not None:
        linears = {f"linear_attn.{name}": (*shape, False) for name, shape in delta.matrices(hidden).items()}
    if moe is None:
        linears |= _mlp("mlp", hidden, config.intermediate_size, config.mlp_bias)
    else:
        linears["mlp.gate"] = (moe.num_experts, hidden, moe.router_bias)
        for expert in range(moe.num_experts):
            linears |= _mlp(f"mlp.experts.{expert}", hidden, moe.intermediate_size, moe.expert_bias)
        if moe.shared_size:
            linears |= _mlp("mlp.shared_expert", hidden, moe.shared_size, False)
        if moe.shared_gate:
            linears["mlp.shared_expert_gate"] = (1, hidden, False)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm and delta is None:
        whole = config.whole_qk_norm
        norms["self_attn.q_norm"] = queries if whole else config.head_dim
        norms["self_attn.k_norm"] = keys if whole else config.head_dim

    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    if delta is not None:
        shapes |= {f"{prefix}linear_attn.{name}": shape for name, shape in delta.tensors().items()}
    if config.attention_sinks:
        shapes[f"{prefix}self_attn.sinks"] = (config.num_heads,)
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def _mlp(prefix: str, hidden: int, inner: int, bias: bool) -> dict[str, tuple[int, int, bool]]:
    return {
        f"{prefix}.gate_proj": (inner, hidden, bias),
        f"{prefix}.up_proj": (inner, hidden, bias),
        f"{prefix}.down_proj": (hidden, inner, bias),
    }


def validate_tensors(checkpoint: Checkpoint) -> None:
    """Checks that a checkpoint holds exactly the tensors that its configuration needs.

    Tensors of NOT_READ, and a copy of tied embeddings under lm_head.weight, are ignored.
    Raises ValueError naming the first tensor that is missing, unexpected, mis-shaped or not of a float type.
    """
    if checkpoint.config.num_layers > len(checkpoint.tensors):  # first: a damaged file may give a huge number
        raise ValueError(f"{checkpoint.source}: it has fewer tensors than layers, {checkpoint.config.num_layers}")
    expected = expected_tensors(checkpoint.config)
    missing = [name for name in expected if name not in checkpoint.tensors]
    if missing:
        raise ValueError(f"{checkpoint.source}: tensor '{missing[0]}' is missing ({len(missing)} missing in all)")
    for name, info in checkpoint.tensors.items():
        if name in expected:
            if info.shape != expected[name]:
                raise ValueError(
                    f"{checkpoint.source}: tensor '{name}' has shape {info.shape}, expected {expected[name]}"
                )
            if info.dtype not in (*FLOAT_FORMATS, *BLOCK_TYPES):
                wanted = ", ".join(FLOAT_FORMATS)
                raise ValueError(f"{checkpoint.source}: tensor '{name}' has type {info.dtype}, expected {wanted}")
        elif not (NOT_READ.fullmatch(name) or name == "lm_head.weight"):
            raise ValueError(f"{checkpoint.source}: tensor '{name}' is unexpected for {checkpoint.config.architecture}")
