"""Checkpoints of seeded random weights, for benchmarks and tests of model shapes without their files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from specengine.models.checkpoint_base import CPU, Checkpoint, TensorInfo, expected_tensors
from specengine.models.config import ModelConfig
from specengine.ops.weight import FLOAT_FORMATS

_BLOCK_ELEMENTS = 1 << 20


class RandomCheckpoint(Checkpoint):
    """Normal weights that depend on seed, tensor name and shape only, never on which rows are read.

    A tensor of several blocks is drawn by the generator of its device: a large model would take minutes on the CPU.
    Smaller tensors are the same on every device.
    shapes: of the tensors; None means those of a model of this config.  integers: names of integer tensors, all 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        source: str = "random",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        integers: Collection[str] = (),
    ) -> None:
        dtype = config.dtype or "float32"
        if dtype not in FLOAT_FORMATS:
            raise ValueError(f"config.dtype must be one of {', '.join(FLOAT_FORMATS)}, got {dtype!r}")
        self.source = source
        self.seed = seed
        self.config = replace(config, dtype=dtype)
        shapes = expected_tensors(config) if shapes is None else shapes
        kinds = {name: "int64" if name in integers else dtype for name in shapes}
        self.tensors = {name: TensorInfo(shape, kinds[name]) for name, shape in shapes.items()}

    def read_rows(self, name: str, start: int, stop: int, device: torch.device = CPU) -> torch.Tensor:
        info = self._info(name)
        if device.type == "cpu" or math.prod(info.shape) <= _BLOCK_ELEMENTS:
            return super().read_rows(name, start, stop, device)
        rows = torch.empty((stop - start, *info.shape[1:]), dtype=FLOAT_FORMATS[info.dtype], device=device)
        self._fill_rows(rows, name, start, stop)
        return rows

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        shape = self.tensors[name].shape
        if "norm" in name or not out.is_floating_point():
            out.fill_(1 if "norm" in name else 0)
            return
        if name.endswith("dt_bias"):
            out.fill_(1)
            return
        std = self._std(name, shape)
        # a block is always drawn whole: its values must not depend on which rows are read
        rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
        for block in range(start // rows, -(-stop // rows)):
            first, last = block * rows, min((block + 1) * rows, shape[0])
            generator = torch.Generator(out.device).manual_seed(zlib.crc32(f"{self.seed}/{name}/{block}".encode()))
            values = torch.empty((last - first, *shape[1:]), device=out.device).normal_(0.0, std, generator=generator)
            if name.endswith("linear_attn.decay"):
                values = _decay(values)
            begin, end = max(first, start), min(last, stop)
            out[begin - start : end - start] = values[begin - first : end - first]

    def _std(self, name: str, shape: tuple[int, ...]) -> float:
        """Returns a spread for activations near 1 and logits near 2, so that softmax is neither flat nor one-hot."""
        if len(shape) == 1:  # biases, and sinks, which are scores
            return 0.05 if name.endswith(".bias") else 1.0
        if name.endswith("conv1d.weight"):
            return 1 / math.sqrt(shape[-1])
        std = 1 / math.sqrt(shape[1])
        if name.endswith(("o_proj.weight", "linear_attn.out_proj.weight", "down_proj.weight")):
            return std / math.sqrt(2 * self.config.num_layers)  # the residual stream sums 2 * num_layers outputs
        return 2 * std if name.startswith(("model.embed_tokens", "lm_head")) else std


def _decay(normal: torch.Tensor) -> torch.Tensor:
    """Makes factors of decay from normal numbers: exp(A_log) from 0.01 to 16, the range of trained models."""
    low, high = math.log(0.01), math.log(16.0)
    uniform = torch.special.ndtr(normal)
    return -torch.exp(low + (high - low) * uniform)
