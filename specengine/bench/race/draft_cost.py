"""What published drafters compute per cycle, with random weights: only the time counts.

B requests. Of the shape of a target layer each; what a real one has beside that (wider inputs, fusion of hidden states) is
made up for by a wider MLP, so that the bytes read are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.transformer import Transformer, load_transformer
from specengine.ops.expand_backbone import BackboneExpander
from specengine.ops.weight import FLOAT_FORMATS

PAGES = 64  # of the drafter's own cache per request; longer prefixes see them again and again
EAGLE3_VOCABULARY = 32000
FASTEAGLE_LAYERS = 7

Mark = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where a batch's rows and their keys and values go. rows: without tokens."""

    rows: TreeBatch
    cache: KVCache
    block_table: torch.Tensor


class DraftCost:
    """Layers of a drafter, ready to run. vocabulary: of its own embedding and head.  extra: weights that the layers of
    the target's shape lack.  nodes: rows per request and pass.  positions: that it may add to a prefix."""

    def __init__(
        self, target: Transformer, layers: int, vocabulary: int, extra: int, *, nodes: int, positions: int
    ) -> None:
        c = target.config
        wider = -(-extra // (3 * c.hidden_size * layers) // 64) * 64
        config = replace(
            c,
            num_layers=layers,
            vocab_size=min(vocabulary, c.vocab_size),
            intermediate_size=c.intermediate_size + wider,
            tie_embeddings=False,
            sliding_window=None,
            sliding_layers=(),
        )
        dtype = next((form for form in FLOAT_FORMATS if form in target.formats), "float32")
        self.target, self.nodes = target, nodes
        self.net = load_transformer(RandomCheckpoint(config, seed=1), dtype, target.device, target.ops)
        self.net.ensure_positions(c.max_position)
        self.net.tune()
        self._longest = max(0, c.max_position - positions)
        self._table_width = -(-(c.max_position + nodes) // PAGE_SIZE)
        self._places: dict[int, Place] = {}

    def hidden(self, tokens: torch.Tensor, lengths: torch.Tensor, step: int) -> torch.Tensor:
        """HiddenStates of `nodes` rows per request, one behind the prefix and its siblings. tokens: int32 [B * nodes]."""
        place = self._place(len(lengths))
        rows = replace(place.rows, tokens=tokens % self.net.config.vocab_size)
        batch = CacheBatch(place.block_table, lengths.clamp(max=self._longest) + step)
        return self.net.hidden(rows, place.cache, batch)

    def _place(self, batch: int) -> Place:
        """Made by the first call, which is not captured."""
        if batch not in self._places:
            device, nodes = self.net.device, self.nodes
            roots = TreeBatch.of([DraftTree([0], [-1])] * (batch * nodes), device, masked=True)
            own = (1 | 1 << torch.arange(nodes, device=device)).int()  # a node sees the prefix, the first and itself
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
            rows = replace(roots, row_start=starts, ancestors=own.repeat(batch)[:, None].contiguous(), nodes=nodes)
            cache = self.net.new_cache(batch * PAGES)
            cache.k.normal_(), cache.v.normal_()
            table = torch.arange(self._table_width, dtype=torch.int32, device=device) % PAGES
            first = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * PAGES
            self._places[batch] = Place(rows, cache, table + first)
        return self._places[batch]


class Eagle3(DraftCost):
    """EAGLE-3 (Li et al. 2025): a layer, a head of 32,000 tokens and an argmax per level, one level after the other.

    k > 1: so many rows per level, as for a tree.
    """

    def __init__(self, target: Transformer, levels: int, k: int) -> None:
        c = target.config
        # q, k and v read embedding and hidden state together; three hidden states become one, once per cycle
        extra = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size + 3 * c.hidden_size**2 // levels
        super().__init__(target, 1, EAGLE3_VOCABULARY, extra, nodes=min(k, 32), positions=levels)
        self.levels = levels

    def __call__(self, roots: torch.Tensor, lengths: torch.Tensor, mark: Mark = lambda phase: None) -> None:
        tokens = roots[:, None].repeat(1, self.nodes).view(-1)
        for step in range(self.levels):
            hidden_states = self.hidden(tokens, lengths, step)
            tokens = self.net.ops.linear_argmax(hidden_states, self.net.head)


class FastEagle(DraftCost):
    """FastEagle (2025): layers in a cascade, in one pass, each with a head that is the target's; all levels expanded in
    one go."""

    def __init__(self, target: Transformer, levels: int, k: int) -> None:
        extra = 5 * target.config.hidden_size**2  # three hidden states become one; that and the embedding become one
        super().__init__(target, FASTEAGLE_LAYERS, 1, extra, nodes=1, positions=1)
        self.levels, self.k = levels, k
        self._expanders: dict[int, BackboneExpander] = {}

    def __call__(self, roots: torch.Tensor, lengths: torch.Tensor, mark: Mark = lambda phase: None) -> None:
        batch, vocab = len(lengths), self.target.config.vocab_size
        if batch not in self._expanders:  # made by the first call, which is not captured
            self._expanders[batch] = BackboneExpander(batch, self.levels, vocab, [self.k], device=self.net.device)
        hidden_states = self.hidden(roots, lengths, 0)
        rows = hidden_states.repeat(1, self.levels).view(batch * self.levels, -1)
        logits = self.net.ops.linear(rows, self.target.head)
        mark("draft")
        self._expanders[batch](logits.view(batch, self.levels, vocab), roots)
        mark("expand")


COSTS: dict[str, type[Eagle3 | FastEagle]] = {"eagle3": Eagle3, "fasteagle": FastEagle}
