"""P-EAGLE's network: EAGLE-3's, which reads masks after the last pair of hidden state and token."""

from __future__ import annotations

import torch

from specengine.drafters.eagle.eagle3_network import Eagle3Network
from specengine.drafters.growth import Opened, Steps
from specengine.ops.growth.growing_trees import Logits
from specengine.ops.row_tools import stack_rows, take_rows


class PEagleNetwork:
    """Drafts all levels in one pass.

    mask_state: float32 [1, hidden], fused; enters in place of a mask's hidden state.
    """

    def __init__(self, eagle: Eagle3Network, mask_state: torch.Tensor) -> None:
        self.eagle, self._mask_state = eagle, mask_state

    def draft(self, opened: Opened, levels: int) -> Steps:
        """Reads the pairs and the masks; the outputs of each last pair and its masks are the levels."""
        states = stack_rows([self.eagle.fuse(opened.pairs), self._mask_state])
        outputs = self.eagle.forward(opened.rows, states, opened.place, opened.pool, above=opened.above)
        yield Logits(self.eagle.logits(take_rows(outputs.read, opened.last)), levels=levels)
