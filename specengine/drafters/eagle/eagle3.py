"""EAGLE-3: one layer reads the target's low, middle and high hidden states and drafts level by level (Li et al. 2025)."""

from __future__ import annotations

from specengine.drafters.eagle.checkpoint import EagleDrafter, load_eagle3
from specengine.drafters.eagle.drafter import Eagle, EagleConfig
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer


class Eagle3(Eagle):
    """Drafts the tree of its own confidence (EAGLE-2)."""

    name = "eagle3"
    config_type = EagleConfig

    def _open(self, dtype: str, path: str | None, target: Transformer) -> EagleDrafter:
        return load_eagle3(open_drafter(self.name, path, target), target, dtype)
