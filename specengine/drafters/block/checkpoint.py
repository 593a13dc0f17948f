"""A one-pass block drafter from its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.drafters.block.backbone import Backbone, BackboneParts
from specengine.drafters.block.head import BlockHead
from specengine.drafters.block.head_parts import read_head
from specengine.drafters.block.parts import BlockParts
from specengine.drafters.block.settings import BlockSettings
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer


@dataclass(frozen=True)
class LoadedBlock:
    """A drafter's backbone and head."""

    settings: BlockSettings
    backbone: Backbone
    head: BlockHead


def load_block(checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> LoadedBlock:
    """Loads a drafter. Raises ValueError naming a part or key that does not fit the target or is not implemented."""
    parts = BlockParts(checkpoint, target, dtype)
    embedding, vocabulary = parts.embedding(), parts.vocabulary()
    layers = [parts.layer(number) for number in range(parts.config.num_layers)]
    head = read_head(parts, vocabulary, embedding)
    parts.expect_nothing_else()
    loader = parts.loader
    backbone = Backbone(
        BackboneParts(
            config=parts.config,
            settings=parts.settings,
            layers=layers,
            embedding=embedding,
            fc=loader.linear("fc"),
            context_norm=loader.vector("hidden_norm.weight"),
            final_norm=loader.vector("norm.weight"),
            target_size=target.config.hidden_size,
            ops=target.ops,
            device=target.device,
        )
    )
    return LoadedBlock(parts.settings, backbone, head)
