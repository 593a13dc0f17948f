"""FastEagle: N cascaded layers guess N tokens from one pass over the target's features (sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine._C import MAX_NODES
from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.fasteagle.network import Cascade
from specengine.drafters.hidden_states.drafter import HiddenStateDrafter
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.drafters.shipped import open_drafter
from specengine.engine.device.graph_batch import GraphBatch
from specengine.models.transformer import Transformer
from specengine.ops.expand_backbone import BackboneExpander, BackboneTrees
from specengine.utils.spec_string import check_range

READINGS = ("text", "formula")


@dataclass(frozen=True)
class Config:
    """top_k: nodes per level; the first one has children (k = 1: a chain).  levels: of the tree; 0: all there are.
    reading: of the paper's tree size: `text` (levels x top_k and the root) or `formula` (1 + (levels - 1) x top_k).
    adaptive: keep the nodes that pay, else always the whole tree.  dtype: of the drafter's weights, as the engine's.
    """

    top_k: int = 4
    levels: int = 0
    reading: str = "text"
    adaptive: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_range("top_k", self.top_k, 1, MAX_NODES - 1)
        check_range("levels", self.levels, 0, MAX_NODES - 1)
        if self.reading not in READINGS:
            raise ValueError(f"reading: expected {' or '.join(READINGS)}, got {self.reading!r}")


class FastEagle(HiddenStateDrafter):
    """Drafts a tree with one pass of its layers; a backbone node's siblings are leaves, whatever they would lead to."""

    name = "fasteagle"
    config_type = Config
    config: Config
    network: Cascade

    def __init__(self, config: Config, path: str | None, target: Transformer) -> None:
        network = Cascade(open_drafter(self.name, path, target), target, config.dtype)
        levels = config.levels or network.levels
        check_range("levels", levels, 1, network.levels)
        levels -= config.reading == "formula"
        check_range("levels", levels, 1, MAX_NODES - 1)
        check_range("top_k", config.top_k, 1, min(network.head.rows, (MAX_NODES - 1) // levels))
        super().__init__(config, target, network, network.hidden_state_layers, levels)
        self._expanders: dict[int, tuple[BackboneExpander, torch.Tensor]] = {}  # by batch size

    @property
    def drafts_chains(self) -> bool:
        return self.config.top_k == 1

    @property
    def max_nodes(self) -> int:
        return 1 + self.config.top_k * self.levels

    def draft_on_device(self, slots: GraphBatch) -> TreeBatch:
        pairs, history = slots.drafter_state, slots.history
        place = CacheBatch(slots.cache.block_table, pairs.first[: slots.size])
        trees = self._expand(self.network.outputs(pairs.rows(slots), place, self._pool))
        tokens = self.network.target_ids(trees.tokens)
        tokens[:, :1] = history.tokens.gather(1, history.length[:, None].long() - 1)
        limits = torch.where(pairs.counts[: slots.size] > 0, self.levels, 0)  # nothing read, nothing drafted
        return slots.selected(tokens, trees.parents, trees.depths, trees.scores, limits)

    def _trees(self, requests: Sequence) -> list[ScoredTree]:
        trees = self._expand(self._read(requests, [pairs.count for pairs in self._pairs(requests)]))
        before = trees.scores.gather(1, trees.parents.clamp(min=0).long())
        columns = (self.network.target_ids(trees.tokens), trees.parents, (trees.scores - before).exp_())
        return [
            ScoredTree(*tree).rooted(request.tokens[-1], request.draft_limit)
            for request, *tree in zip(requests, *(column.tolist() for column in columns), strict=True)
        ]

    def _read(self, requests: Sequence, counts: Sequence[int], drafting: bool = True) -> torch.Tensor:
        """The layers' outputs [B, levels, hidden] at the last of the pairs."""
        pairs = self._pairs(requests)
        place = self._place(requests, [own.first for own in pairs])
        self.network.ensure_positions(max(own.first + count for own, count in zip(pairs, counts, strict=True)))
        return self.network.outputs(PairRows.take(requests, pairs, counts, self._device), place, self._pool)

    def _expand(self, outputs: torch.Tensor) -> BackboneTrees:
        """Trees whose root is still to be set, of the layers' outputs [B, levels, hidden]."""
        outputs = outputs[:, : self.levels]
        batch, levels, _ = outputs.shape
        logits = self.network.logits(outputs.flatten(0, 1)).view(batch, levels, -1)
        if batch not in self._expanders:
            expander = BackboneExpander(batch, levels, logits.shape[-1], [self.config.top_k], (), self._device)
            self._expanders[batch] = (expander, torch.zeros(batch, dtype=torch.int32, device=self._device))
        expander, roots = self._expanders[batch]
        return expander(logits, roots)
