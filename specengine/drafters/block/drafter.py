"""DFlash, JetSpec, DSpark and Domino as drafters: one pass over a block of mask tokens drafts all levels.

A draft first reads the target's hidden states that the last cycle made known. Their keys and values stay; those of the
block are overwritten by the next draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from specengine.draft_trees.shapes import Beam, BestFirst, Shape, just_below
from specengine.drafters.block.checkpoint import LoadedBlock, load_block
from specengine.drafters.block.config import BlockConfig
from specengine.drafters.block.gguf import open_gguf
from specengine.drafters.block.network import BlockNetwork
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.shipped import open_drafter
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer


def _open(name: str, path: str | None, target: Transformer) -> DraftCheckpoint:
    if path is not None and Path(path).suffix.lower() == ".gguf":
        return open_gguf(Path(path))
    return open_drafter(name, path, target)


class BlockDrafter(NetworkDrafter):
    """Drafts by one pass over a block. families: of checkpoints that the name stands for."""

    config_type = BlockConfig
    config: BlockConfig
    families: ClassVar[tuple[str, ...]]

    def __init__(self, config: BlockConfig, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        checkpoint = _open(self.name, path, target)
        loaded = load_block(checkpoint, target, config.dtype)
        if (problem := self._misnamed(loaded)) is not None:
            raise checkpoint.error(problem)
        settings, backbone, head = loaded.settings, loaded.backbone, loaded.head
        if config.threshold and not head.estimates:
            raise checkpoint.error(f"has no confidence head, which threshold={config.threshold} asks for")
        network = BlockNetwork(settings, backbone, head)
        nodes = 1 + settings.levels if config.tree == "chain" else config.nodes
        drawn = min(settings.levels, nodes - 1)  # levels of drawn trees
        self.prepare(
            target,
            network=network,
            reader=PairReader(
                self.name,
                backbone,
                target,
                hidden_state_layers=backbone.hidden_state_layers,
                levels=settings.levels,
                beyond=settings.block_size,
                rows=settings.block_size,
                behind=1,
            ),
            shape=self._shape(config, loaded, target.ops.on_device),
            drawn_shape=self._comb(drawn, min(config.top_k, head.most_children, (nodes - 1) // drawn)),
            columns=DraftVocabulary.of(
                head.vocabulary.tokens, head.vocabulary.head.rows, target.config.vocab_size, target.device
            ),
            projections=network.projections,
            nodes=nodes,
            slots=settings.block_size,
        )

    def _shape(self, config: BlockConfig, loaded: LoadedBlock, on_device: bool) -> Shape:
        """Returns the shape of trees whose children are the likeliest."""
        head, levels = loaded.head, loaded.settings.levels
        if config.tree == "chain":
            return self._comb(levels, 1)
        children = min(config.nodes - 1 if config.tree == "ddtree" else config.top_k, head.most_children)
        if not config.tree and head.reads_path:
            return Beam(levels, children, min(config.beam, children))
        shape = BestFirst(config.tree or "ddtree", levels, config.nodes, children, config.beta)
        if on_device and not head.reads_path:
            shape.check_room()
        return shape

    def _comb(self, levels: int, children: int) -> Beam:
        """Returns the shape whose first child of a level has children; a threshold makes it a chain that may end."""
        if threshold := self.config.threshold:
            return Beam(levels, 1, widths=(0, 1), thresholds=(just_below(threshold),))
        return Beam(levels, children)

    def _misnamed(self, loaded: LoadedBlock) -> str | None:
        """Returns why the checkpoint is not what the drafter's name says, or None."""
        if loaded.settings.family in self.families:
            return None
        return f"is a {loaded.settings.family} drafter; use {loaded.settings.family}:PATH"


class DFlash(BlockDrafter):
    """DFlash (arXiv 2602.06036): all slots of a block see each other."""

    name = "dflash"
    families = ("dflash",)

    def _misnamed(self, loaded: LoadedBlock) -> str | None:
        if loaded.settings.family == "dspark" and not loaded.head.reads_path:
            return None  # DeepSpec's files of DFlash are those of DSpark without a second head
        return super()._misnamed(loaded)


class JetSpec(BlockDrafter):
    """JetSpec (arXiv 2606.18394): a slot sees the slots before it."""

    name = "jetspec"
    families = ("dflash",)

    def _misnamed(self, loaded: LoadedBlock) -> str | None:
        if loaded.settings.family == "dflash" and not loaded.settings.causal:
            return "is a drafter whose slots all see each other; use dflash:PATH"
        return super()._misnamed(loaded)


class DSpark(BlockDrafter):
    """DSpark (arXiv 2607.05147): a Markov head reads the token above, and a confidence head estimates chances."""

    name = "dspark"
    families = ("dspark",)


class Domino(BlockDrafter):
    """Domino: a GRU corrects the slots' logits along the drafted path."""

    name = "domino"
    families = ("domino",)
