"""Checkpoints of a training run: files that appear whole or not at all; the newest two are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specengine.utils.atomic_file import atomic_file

_KEPT = 2


def save_state(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes checkpoint-STEP.pt and deletes all but the newest two."""
    path = folder / f"checkpoint-{step:08d}.pt"
    with atomic_file(path) as part, part.open("wb") as file:
        torch.save(state, file)
    for old in _states(folder)[:-_KEPT]:
        old.unlink()
    return path


def load_state(folder: Path, argument: str = "out") -> dict[str, Any] | None:
    """Loads the newest readable state, on the CPU; None without checkpoints.

    Raises ValueError naming the argument where no checkpoint can be read.
    """
    paths = _states(folder)
    for path in reversed(paths):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:
            continue  # torch.load reports a damaged file by any exception; the checkpoint before it may be whole
        if not isinstance(state, dict) or "about" not in state:
            raise ValueError(f"{argument}: {path} is not a checkpoint of this training")
        return state
    if paths:
        raise ValueError(f"{argument}: no checkpoint in {folder} can be read; remove the folder to start again")
    return None


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.pt"))
