"""GLIDE with CAPE (Du et al. 2024): a small model whose layers also attend to the target's own cached keys and values.

Drafter layer m reads those of target layer N_T - N_D + m. It drafts greedily, token by token. The less sure it is of a
token, the more siblings that token gets (CAPE).
"""

from __future__ import annotations

from specengine.draft_policy.cost_model import CycleCosts
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.glide.config import Config
from specengine.drafters.glide.network import GlideNetwork
from specengine.drafters.glide.reader import GlideReader
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer
from specengine.utils.spec_string import check_range


class Glide(NetworkDrafter):
    """Drafts a chain or a backbone with leaves, with one small pass per level."""

    name = "glide"
    config_type = Config
    config: Config

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        if target.tensor_parallel > 1:
            raise ValueError("drafter: glide reads the whole target's cache, of which tensor_parallel leaves a part")
        network = GlideNetwork(open_drafter(self.name, path, target), target, config.dtype, cross=config.cross)
        shape, rows = config.shape, network.head.rows
        check_range("drafter: cape", shape.children, 1, rows)
        self.prepare(
            target,
            network=network,
            reader=GlideReader(self.name, network, target, config.length),
            shape=shape,
            drawn_shape=shape,
            columns=DraftVocabulary.of(network.vocabulary, rows, target.config.vocab_size, target.device),
            projections=network.projections,
            nodes=shape.candidates,
            costs=costs,
        )
        self.native = network.native_draft(shape)
