"""EAGLE-1, -2 and -3 as drafters: true hidden states first, then level by level on the network's own outputs.

A draft first reads the pairs of hidden state and token that the last cycle made known. Their keys and values stay.
Those of drafted nodes lie behind them until the next draft overwrites them.
"""

from __future__ import annotations

from abc import abstractmethod

from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.shapes import Beam, Ranks
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.eagle.checkpoint import LoadedEagle, load_eagle1, load_eagle3
from specengine.drafters.eagle.config import EagleConfig
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.native import growth_shape
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer
from specengine.utils.spec_string import check_range


class Eagle(NetworkDrafter):
    """Drafts the tree of its own confidence (EAGLE-2), with a network that goes on from its own output."""

    config_type = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        loaded = self._open(path, target)
        head = loaded.network.head
        tree = RankTree.named(config.tree) if config.tree else None
        # Rows of the drafter take time on the CPU.
        alone = config.adaptive and not config.beam and not target.ops.on_device
        shape = Ranks(tree) if tree else Beam(config.levels, config.top_k, 1 if alone else config.width)
        check_range("tree: ranks" if tree else "top_k", shape.children, 1, head.rows)
        drawn_levels, drawn_children = config.drawn
        self.prepare(
            target,
            network=loaded.network,
            reader=PairReader(
                self.name,
                loaded.network,
                target,
                hidden_state_layers=loaded.hidden_state_layers,
                levels=shape.levels,
                beyond=shape.levels,
                rows=max(shape.opened),
            ),
            shape=shape,
            drawn_shape=Ranks(tree.without_gaps()) if tree else Beam(drawn_levels, drawn_children),
            columns=DraftVocabulary.of(loaded.tokens, head.rows, target.config.vocab_size, target.device),
            projections=loaded.network.projections,
            nodes=min(shape.candidates, shape.candidates if tree else config.nodes),
            slots=sum(shape.opened),
        )
        if not tree:
            self.native = loaded.network.native_draft(self.columns.tokens, growth_shape(shape, self.max_nodes))

    @abstractmethod
    def _open(self, path: str | None, target: Transformer) -> LoadedEagle:
        """Loads the network of a checkpoint; without a path, of the one that comes with the package."""


class Eagle1(Eagle):
    """EAGLE-1 and -2: one layer goes on from the target's last hidden states, and the target's own head reads it.

    (Li et al. 2024.)
    """

    name = "eagle"

    def _open(self, path: str | None, target: Transformer) -> LoadedEagle:
        return load_eagle1(open_drafter(self.name, path, target), target, self.config.dtype)


class Eagle3(Eagle):
    """EAGLE-3: one layer reads the target's low, middle and high hidden states (Li et al. 2025)."""

    name = "eagle3"

    def _open(self, path: str | None, target: Transformer) -> LoadedEagle:
        return load_eagle3(open_drafter(self.name, path, target), target, self.config.dtype)
