"""Writes a trained drafter: config.json, a card and model.safetensors, each whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specengine.utils.atomic_file import atomic_file

STORAGE = ("bfloat16", "int8", "float32")
_BLOCK = 32  # columns that share a scale


def stored(tensors: dict[str, torch.Tensor], storage: str) -> dict[str, torch.Tensor]:
    """Converts tensors to a storage type: bfloat16, float32 or int8.

    A matrix X in int8 becomes X int8 [rows, columns] and X_scale float16 [rows, columns / 32], symmetric. With int8,
    vectors and matrices of other widths become bfloat16. Integers keep their type.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if not tensor.is_floating_point():
            out[name] = tensor.contiguous()
        elif storage == "int8" and tensor.ndim == 2 and tensor.shape[1] % _BLOCK == 0:
            out[name], out[f"{name}_scale"] = _int8(tensor.float())
        else:
            out[name] = tensor.to(torch.float32 if storage == "float32" else torch.bfloat16).contiguous()
    return out


def _int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = matrix.unflatten(1, (-1, _BLOCK))
    scale = (blocks.abs().amax(-1) / 127).to(torch.float16)
    # codes fit the scale as stored; a block too small for float16 becomes zero
    codes = (blocks / scale.float().clamp(min=1e-7)[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(1), scale


def write_drafter(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], storage: str, card: str
) -> None:
    """Writes the weights last, so that a folder with new weights also has their config and card."""
    with atomic_file(folder / "config.json") as part:
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with atomic_file(folder / "README.md") as part:
        part.write_text(card, encoding="utf-8")
    with atomic_file(folder / "model.safetensors") as part:
        save_file(stored(tensors, storage), part, {"format": "pt"})
