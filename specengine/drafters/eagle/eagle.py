"""EAGLE-1 and -2: one layer goes on from the target's last hidden states, whose own head reads it (Li et al. 2024)."""

from __future__ import annotations

from specengine.drafters.eagle.checkpoint import EagleDrafter, load_eagle1
from specengine.drafters.eagle.drafter import Eagle, EagleConfig
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer


class Eagle1(Eagle):
    """Drafts the tree of its own confidence (EAGLE-2)."""

    name = "eagle"
    config_type = EagleConfig

    def _open(self, dtype: str, path: str | None, target: Transformer) -> EagleDrafter:
        return load_eagle1(open_drafter(self.name, path, target), target, dtype)
