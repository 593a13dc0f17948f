"""Finds a drafter's checkpoint: given by path, random, or shipped with the package for the target."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from specengine.hub.embedded_models import CHECKPOINTS
from specengine.models.draft_checkpoint import DraftCheckpoint, open_draft_checkpoint
from specengine.models.draft_random import random_dflash, random_eagle3, random_fasteagle
from specengine.models.transformer import Transformer

FINGERPRINT = "target_fingerprint"  # a field of config.json
RANDOM: Mapping[str, Callable[[str], DraftCheckpoint]] = {
    "dflash": random_dflash,
    "eagle3": random_eagle3,
    "fasteagle": random_fasteagle,
}


def fingerprint(target: Transformer) -> str:
    """Returns a hash that differs between models with different hidden states, whatever their names and formats."""
    norm = target.final_norm.float().cpu().numpy().tobytes()
    return hashlib.sha256(norm).hexdigest()[:16]


def shipped_folder(drafter: str, target: Transformer) -> Path | None:
    """Returns the folder of the drafter that comes with the package for this target, or None."""
    for config in sorted(CHECKPOINTS.glob(f"*/{drafter}/config.json")):
        if json.loads(config.read_text(encoding="utf-8")).get(FINGERPRINT) == fingerprint(target):
            return config.parent
    return None


def open_drafter(drafter: str, path: str | None, target: Transformer) -> DraftCheckpoint:
    """Opens the checkpoint at a path, `random:<preset>`, or without a path the one that comes with the package.

    Warns where it was trained for another model. Raises ValueError where there is none, or as open_draft_checkpoint
    does.
    """
    kind, _, preset = (path or "").partition(":")
    if kind == "random" and drafter in RANDOM:
        return RANDOM[drafter](preset)
    found = path or shipped_folder(drafter, target)
    if found is None:
        raise ValueError(
            f"drafter: no {drafter} drafter for this model comes with the package; give one as {drafter}:PATH, "
            f"or train one: specengine train --drafter {drafter} --target MODEL --out PATH"
        )
    checkpoint = open_draft_checkpoint(found)
    if checkpoint.json.get(FINGERPRINT, mark := fingerprint(target)) != mark:
        warnings.warn(f"drafter: {found} was trained for another model than this target", stacklevel=2)
    return checkpoint
