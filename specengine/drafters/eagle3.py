"""EAGLE-3: one layer reads the target's low, middle and high features and drafts level by level (Li et al. 2025)."""

from __future__ import annotations

from specengine.eagle_drafter import Eagle, EagleConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.eagle_checkpoint import EagleDrafter, load_eagle3
from specengine.models.transformer import Transformer


class Eagle3(Eagle):
    """Drafts the tree of its own confidence (EAGLE-2)."""

    name = "eagle3"
    Config = EagleConfig

    def load(self, checkpoint: DraftCheckpoint, target: Transformer) -> EagleDrafter:
        return load_eagle3(checkpoint, target, self.config.dtype)
