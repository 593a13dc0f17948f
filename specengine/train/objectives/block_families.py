"""The block drafters that can be trained: what their slots see, how they are read, and what their files say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specengine.rules.base import check_number
from specengine.train.objectives.block import BlockObjective, BlockOptions
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class JetSpecOptions(BlockOptions):
    """Options of `jetspec`: see BlockOptions. The target's distribution is learned, at all depths alike."""

    text: float = 0.0
    soft: float = 1.0
    decay: float = 0.0


@dataclass(frozen=True)
class DSparkOptions(BlockOptions):
    """Options of `dspark`: see BlockOptions.

    markov: rank of what a guess's logits gain by the token above.  confidence: weight of the confidence head's loss;
    0: there is no such head.
    """

    block: int = 7
    text: float = 0.1
    distance: float = 0.9
    markov: int = 64
    confidence: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("markov", self.markov, 1, 4096)
        check_number("confidence", self.confidence, 0, 1000)


class DFlashObjective(BlockObjective):
    """DFlash: slots see each other, and learn the text (arXiv 2602.06036)."""

    name = "dflash"
    options_type = BlockOptions

    def json(self) -> dict[str, Any]:
        """See BlockObjective; z-lab's layout."""
        own = {"mask_token_id": self.mask_token, "target_layer_ids": self.file_layers}
        return {"block_size": self.options.block, "dflash_config": own | ({"causal_head": True} if self.causal else {})}


class JetSpecObjective(DFlashObjective):
    """JetSpec: a slot sees only slots before it, so that trees of its guesses are consistent (arXiv 2606.18394)."""

    name = "jetspec"
    options_type = JetSpecOptions
    causal = True


class DSparkObjective(BlockObjective):
    """DSpark: slot 0 guesses too, a Markov head reads the token above, a third head its own confidence (2607.05147)."""

    name = "dspark"
    options_type = DSparkOptions
    options: DSparkOptions
    anchor_guesses = True

    def heads(self) -> tuple[int, float]:
        """See BlockObjective."""
        return self.options.markov, self.options.confidence

    def json(self) -> dict[str, Any]:
        """See BlockObjective; DeepSpec's layout."""
        confident = self.options.confidence > 0
        return {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": self.options.block,
            "mask_token_id": self.mask_token,
            "target_layer_ids": self.file_layers,
            "markov_rank": self.options.markov,
            "markov_head_type": "vanilla",
            "enable_confidence_head": confident,
            "confidence_head_with_markov": confident,
        }
