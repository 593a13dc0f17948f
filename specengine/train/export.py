"""Writes a trained drafter: config.json, a card and the weights, each whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specengine.models.draft_files import int8_tensors
from specengine.utils.atomic_file import atomic_file

STORAGE = ("bfloat16", "int8", "float32", "packed")
WEIGHTS = "model.safetensors"


def stored(tensors: dict[str, torch.Tensor], storage: str) -> dict[str, torch.Tensor]:
    """Converts tensors to a storage type: bfloat16, float32 or int8.

    A matrix X in int8 becomes X int8 [rows, columns] and X_scale float16 [rows, columns / 32], symmetric. With int8,
    vectors and matrices of other widths become bfloat16. Integers keep their type.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    if storage == "int8":
        return int8_tensors(tensors)
    dtype = torch.float32 if storage == "float32" else torch.bfloat16
    return {name: (x.to(dtype) if x.is_floating_point() else x).contiguous() for name, x in tensors.items()}


def write_drafter(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], storage: str, card: str
) -> None:
    """Writes the weights last, so that a folder with new weights also has their config and card."""
    with atomic_file(folder / "config.json") as part:
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with atomic_file(folder / "README.md") as part:
        part.write_text(card, encoding="utf-8")
    with atomic_file(folder / WEIGHTS) as part:
        save_file(stored(tensors, storage), part, {"format": "pt"})
