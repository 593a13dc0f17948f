"""The computation of published drafters in a cycle, with random weights: it takes their time and drafts nothing.

Each layer has the shape of a target layer. A real drafter also has wider inputs and a fusion of hidden states; a wider
MLP reads as many bytes instead. B: requests.
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

PAGES = 64  # of the drafter's own cache per request; the block table of a longer prefix repeats them
EAGLE3_VOCABULARY = 32000
FASTEAGLE_LAYERS = 7

Mark = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Holds the rows of a batch, whose tokens are filled in per step, and the cache of their keys and values."""

    rows: TreeBatch
    cache: KVCache
    block_table: torch.Tensor


class DraftCost:
    """Runs layers of the target's shape in place of a drafter.

    vocabulary: of the drafter's own embedding and head.  extra: weights of the drafter beyond these layers.
    nodes: rows per request and pass.  positions: most tokens that it adds to a prefix.
    """

    def __init__(
        self, target: Transformer, layers: int, vocabulary: int, extra: int, *, nodes: int, positions: int
    ) -> None:
        shape = target.config
        wider = -(-extra // (3 * shape.hidden_size * layers) // 64) * 64
        config = replace(
            shape,
            num_layers=layers,
            vocab_size=min(vocabulary, shape.vocab_size),
            intermediate_size=shape.intermediate_size + wider,
            tie_embeddings=False,
            sliding_window=None,
            sliding_layers=(),
        )
        dtype = target.draft_dtype("auto")
        if dtype == "auto":
            dtype = next((form for form in FLOAT_FORMATS if form in target.formats), "float32")
        self.target = target
        self.nodes = nodes
        checkpoint = RandomCheckpoint(config, seed=1)
        checkpoint.drafts = True
        self.net = load_transformer(checkpoint, dtype, target.device, target.ops)
        self.net.ensure_positions(shape.max_position)
        self.net.tune()
        self._longest = max(0, shape.max_position - positions)
        self._table_width = -(-(shape.max_position + nodes) // PAGE_SIZE)
        self._places: dict[int, Place] = {}

    def hidden(self, tokens: torch.Tensor, lengths: torch.Tensor, step: int) -> torch.Tensor:
        """Returns hidden states [B * nodes, hidden size] of sibling rows after each prefix.

        tokens: int32 [B * nodes].  lengths: int32 [B], of the prefixes.  step: positions between prefix and rows.
        """
        place = self._place(len(lengths))
        rows = replace(place.rows, tokens=tokens % self.net.config.vocab_size)
        batch = CacheBatch(place.block_table, lengths.clamp(max=self._longest) + step)
        return self.net.hidden(rows, place.cache, batch)

    def _place(self, batch: int) -> Place:
        """Returns the place of a batch size. The first call makes it, and no CUDA graph captures that call."""
        if batch not in self._places:
            device = self.net.device
            nodes = self.nodes
            roots = TreeBatch.of([DraftTree([0], [-1])] * (batch * nodes), device, masked=True)
            own = (
                1 | 1 << torch.arange(nodes, device=device)
            ).int()  # a node sees the prefix, the first node and itself
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
            rows = replace(roots, row_start=starts, ancestors=own.repeat(batch)[:, None].contiguous(), nodes=nodes)
            cache = self.net.new_cache(batch * PAGES)
            cache.k.normal_()
            cache.v.normal_()
            table = torch.arange(self._table_width, dtype=torch.int32, device=device) % PAGES
            first = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * PAGES
            self._places[batch] = Place(rows, cache, table + first)
        return self._places[batch]


class Eagle3(DraftCost):
    """Takes the time of EAGLE-3 (Li et al. 2025): per level one layer, a head of 32,000 tokens and an argmax.

    k: rows per level, more than 1 for a tree.
    """

    def __init__(self, target: Transformer, levels: int, k: int) -> None:
        shape = target.config
        # q, k and v read embedding and hidden state together. Three hidden states become one, once a cycle.
        attention = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden_size
        extra = attention + 3 * shape.hidden_size**2 // levels
        super().__init__(target, 1, EAGLE3_VOCABULARY, extra, nodes=min(k, 32), positions=levels)
        self.levels = levels

    def __call__(self, roots: torch.Tensor, lengths: torch.Tensor, mark: Mark = lambda phase: None) -> None:
        tokens = roots[:, None].repeat(1, self.nodes).view(-1)
        for step in range(self.levels):
            hidden_states = self.hidden(tokens, lengths, step)
            tokens = self.net.ops.linear_argmax(hidden_states, self.net.head)


class FastEagle(DraftCost):
    """Takes the time of FastEagle (2025): layers in a cascade, each with the target's head, and one expansion."""

    def __init__(self, target: Transformer, levels: int, k: int) -> None:
        # Three hidden states become one. Then that one and the embedding become one.
        extra = 5 * target.config.hidden_size**2
        super().__init__(target, FASTEAGLE_LAYERS, 1, extra, nodes=1, positions=1)
        self.levels = levels
        self.k = k
        self._expanders: dict[int, BackboneExpander] = {}

    def __call__(self, roots: torch.Tensor, lengths: torch.Tensor, mark: Mark = lambda phase: None) -> None:
        batch = len(lengths)
        vocab = self.target.config.vocab_size
        if batch not in self._expanders:  # the first call, which no CUDA graph captures
            self._expanders[batch] = BackboneExpander(batch, self.levels, vocab, [self.k], device=self.net.device)
        hidden_states = self.hidden(roots, lengths, 0)
        rows = hidden_states.repeat(1, self.levels).view(batch * self.levels, -1)
        logits = self.net.ops.linear(rows, self.target.head)
        mark("draft")
        self._expanders[batch](logits.view(batch, self.levels, vocab), roots)
        mark("expand")


COSTS: dict[str, type[Eagle3 | FastEagle]] = {"eagle3": Eagle3, "fasteagle": FastEagle}
