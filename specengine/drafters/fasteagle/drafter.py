"""FastEagle: N cascaded layers guess N tokens from one pass over the target's hidden states (sections 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

from specengine._C import MAX_NODES
from specengine.draft_policy.policy import Source
from specengine.draft_trees.shapes import Beam
from specengine.drafters.fasteagle.checkpoint import load_fasteagle
from specengine.drafters.fasteagle.network import FastEagleNetwork
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.native import growth_shape
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.shipped import open_drafter
from specengine.models.transformer import Transformer
from specengine.utils.spec_string import check_range

READINGS = ("text", "formula")


@dataclass(frozen=True)
class Config:
    """The options.

    top_k: nodes per level; the first one has children (k = 1: a chain).  levels: of the tree; 0: all there are.
    reading: of the paper's tree size: `text` (levels x top_k and the root) or `formula` (1 + (levels - 1) x top_k).
    adaptive: keep the nodes that pay, otherwise the whole tree.  dtype: of the drafter's weights, as the engine's.
    sample: draw the children from the drafter's distribution, for rules that read it.
    """

    top_k: int = 4
    levels: int = 0
    reading: str = "text"
    adaptive: bool = True
    dtype: str = "auto"
    sample: bool = False

    def __post_init__(self) -> None:
        check_range("top_k", self.top_k, 1, MAX_NODES - 1)
        check_range("levels", self.levels, 0, MAX_NODES - 1)
        if self.reading not in READINGS:
            raise ValueError(f"reading: expected {' or '.join(READINGS)}, got {self.reading!r}")


class FastEagle(NetworkDrafter):
    """Drafts a tree with one pass of its layers; the siblings of a backbone node are leaves."""

    name = "fasteagle"
    config_type = Config
    config: Config

    def __init__(self, config: Config, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        checkpoint = open_drafter(self.name, path, target)
        network = FastEagleNetwork(load_fasteagle(checkpoint, target, config.dtype, config.levels), target)
        levels = network.levels - (config.reading == "formula")
        check_range("levels", levels, 1, MAX_NODES - 1)
        check_range("top_k", config.top_k, 1, min(network.head.rows, (MAX_NODES - 1) // levels))
        shape, layers = Beam(levels, config.top_k), network.hidden_state_layers
        self.prepare(
            target,
            network=network,
            reader=PairReader(self.name, network, target, hidden_state_layers=layers, levels=levels, beyond=0),
            shape=shape,
            drawn_shape=shape,
            columns=network.columns,
            projections=network.projections,
            nodes=shape.candidates,
        )
        self.native = network.native_draft(growth_shape(shape))

    drafted_levels = Source.drafted_levels  # each level takes the time of a head
