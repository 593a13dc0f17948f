"""Medusa (Cai et al. 2024, sec. 2.1): small heads on the target's last hidden state, each one token further ahead.

A head does not know the tokens that earlier heads drafted, so the shape of the tree is fixed beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

from specengine import _C
from specengine._C import MAX_NODES
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.policy import Source
from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.shapes import Ranks
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.hidden_states.last_state import LastStateReader
from specengine.drafters.medusa.heads import read_heads
from specengine.drafters.medusa.network import MedusaNetwork
from specengine.drafters.native import NativeDraft, growth_shape
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Config:
    """The options.

    tree: a published one by name, or a JSON file of rank paths, best first. Levels without a head are left out.
    nodes: of the largest tree, root included.
    adaptive: draft the likeliest nodes that pay, otherwise all. Any choice is lossless under the rule `match`.
    dtype: of the heads, as the engine's.
    sample: draw the children from the heads' distributions, for rules that read them.
    """

    tree: str = "mc_sim_7b_63"
    nodes: int = 64
    adaptive: bool = True
    dtype: str = "auto"
    sample: bool = False

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)


class Medusa(NetworkDrafter):
    """Drafts from the target's state of the position before the root, with one head per level."""

    name = "medusa"
    config_type = Config
    config: Config

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        checkpoint = open_drafter(self.name, path, target)
        tokens, heads = checkpoint.vocabulary(target.config), read_heads(checkpoint, config.dtype, target)
        tree = RankTree.named(config.tree).first(config.nodes - 1, len(heads))
        shape, rows = Ranks(tree), heads[0].logits.rows
        check_range("drafter: tree: ranks", shape.children, 1, rows)
        network, reader = MedusaNetwork(heads, target.ops), LastStateReader(target, len(heads))
        self.prepare(
            target,
            network=network,
            reader=reader,
            shape=shape,
            drawn_shape=Ranks(tree.without_gaps()),
            columns=DraftVocabulary.of(tokens, rows, target.config.vocab_size, target.device),
            projections=network.projections,
            nodes=shape.candidates,
            costs=costs,
        )
        if not target.ops.on_device:
            natives = tuple(head.native for head in heads[: shape.levels])
            weights = _C.HeadsWeights(target.config.hidden_size, natives, self.columns.tokens)
            self.native = NativeDraft(weights, growth_shape(shape))

    drafted_levels = Source.drafted_levels  # each level takes the time of a head
