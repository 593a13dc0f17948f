"""Drafters that come with the package, found by what they were trained for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from specengine.models.transformer import Transformer

FOLDER = Path(__file__).parent.parent / "checkpoints"


def fingerprint(target: Transformer) -> str:
    """What tells the models apart whose hidden states differ, whatever they are called and however they are stored."""
    norm = target.final_norm.float().cpu().numpy().tobytes()
    return hashlib.sha256(norm).hexdigest()[:16]


def shipped(drafter: str, target: Transformer) -> Path | None:
    """The folder of the drafter that comes with the package for this target, if one does."""
    for config in sorted(FOLDER.glob(f"*/{drafter}/config.json")):
        if json.loads(config.read_text(encoding="utf-8")).get("target_fingerprint") == fingerprint(target):
            return config.parent
    return None


def find_drafter(drafter: str, path: str | None, target: Transformer) -> str | Path:
    """The given path, or the folder that comes with the package. Raises ValueError where there is neither."""
    if path is not None:
        return path
    found = shipped(drafter, target)
    if found is None:
        raise ValueError(
            f"drafter: no {drafter} drafter for this model comes with the package; give one as {drafter}:PATH, "
            f"or train one: specengine train --drafter {drafter} --target MODEL --out PATH"
        )
    return found
