"""Multi-token prediction: the drafter that lies in the checkpoints of Qwen3.5, Qwen3.6 and Qwen3-Next.

It was trained together with its model to guess one token further. Deeper levels go on from its own output.
"""

from __future__ import annotations

from specengine.drafters.eagle.checkpoint import LoadedEagle
from specengine.drafters.eagle.drafter import Eagle
from specengine.drafters.mtp.checkpoint import load_mtp
from specengine.models.transformer import Transformer


class Mtp(Eagle):
    """Drafts as EAGLE does, with the network of the target's own checkpoint."""

    name = "mtp"

    def _open(self, path: str | None, target: Transformer) -> LoadedEagle:
        return load_mtp(path, target, self.config.dtype)
