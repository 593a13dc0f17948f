"""Medusa's heads, from their checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specengine import _C
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.decoder import native_projection
from specengine.ops.weight import Projection

PREFIXES = ("", "medusa_head.", "medusa_heads.")  # of heads alone, and of files that hold the target too


@dataclass(frozen=True)
class Head:
    """x becomes x + silu(block(x)) block by block, then logits; head 0 drafts the token behind the root."""

    blocks: tuple[Projection, ...]
    logits: Projection

    @property
    def native(self) -> _C.DraftHead:
        """The head as the core takes it."""
        return _C.DraftHead(tuple(map(native_projection, self.blocks)), native_projection(self.logits))


def read_heads(checkpoint: DraftCheckpoint, dtype: str, target: Transformer) -> list[Head]:
    """Loads the heads. Raises ValueError where they do not fit the target.

    Names: `{head}.{block}.linear.weight` and `.bias`, then `{head}.{blocks}.weight`. The oldest files lack the last
    one; the target's own head is used then.
    """
    hidden = target.config.hidden_size
    loader = WeightLoader(checkpoint, target.draft_dtype(dtype), target.device, target.ops)
    names = checkpoint.tensors
    tokens = checkpoint.vocabulary(target.config)
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}0.0.linear.weight" in names), None)
    if prefix is None:
        raise checkpoint.error("holds no Medusa heads: tensor '0.0.linear.weight' is missing")
    linear = re.compile(re.escape(prefix) + r"(\d+)\.(\d+)\.linear\.weight")
    places = [tuple(map(int, found.groups())) for found in map(linear.fullmatch, names) if found]
    shared = target.head_rows(None if tokens is None else tokens.int().to(target.device))
    heads: list[Head] = []
    for i in range(1 + max(places)[0]):
        count = 1 + max((block for head, block in places if head == i), default=0)
        blocks = [f"{prefix}{i}.{block}.linear" for block in range(count)]
        own = f"{prefix}{i}.{count}"
        for block in blocks:
            checkpoint.expect(f"{block}.weight", hidden, hidden)
        if f"{own}.weight" in names:
            size = checkpoint.rows(f"{own}.weight")
            if (size > shared.rows) if tokens is None else (size != shared.rows):
                expected = f"the target has {shared.rows}" if tokens is None else f"its d2t names {shared.rows}"
                raise checkpoint.error(f"head {i} tells {size} tokens apart, {expected}")
            checkpoint.expect(f"{own}.weight", size, hidden)
        last = loader.linear(own) if f"{own}.weight" in names else shared
        heads.append(Head(tuple(map(loader.linear, blocks)), last))
    if len(sizes := {head.logits.rows for head in heads}) > 1:
        raise checkpoint.error(f"its heads have different vocabularies: {sorted(sizes)} tokens")
    return heads
