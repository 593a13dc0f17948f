"""FastEagle's network. Layer i reads layer i - 1's output and its own cache.

The first layer reads the fused hidden states of a position and the embedding of the token after it. Every layer's
output is a guess of the target's last hidden state, one token further.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine import _C
from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.fasteagle.checkpoint import FastEagleParts, Markov
from specengine.drafters.growth import Opened, Steps
from specengine.drafters.hidden_states.halves import Halves, HalvesByOps, HalvesInOneKernel
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.drafters.native import NativeDraft
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.models.transformer import Transformer
from specengine.ops.decoder import Decoder, Rows, native_projection
from specengine.ops.growth.growing_trees import Logits
from specengine.ops.growth.row_inputs import join_rows
from specengine.ops.row_tools import FixedRows, join_columns, take_rows


class FastEagleNetwork:
    """Runs the network of a checkpoint beside its target.

    head: of the drafter's vocabulary, whose tokens are `columns`.  projections: its linear layers.
    levels: one per layer.
    """

    def __init__(self, parts: FastEagleParts, target: Transformer) -> None:
        self.config = c = parts.config
        self.levels = c.num_layers
        self.hidden_state_layers = parts.hidden_state_layers
        self.head = parts.head
        self.columns = DraftVocabulary.of(parts.vocabulary, parts.head.rows, target.config.vocab_size, target.device)
        self.projections = [product for layer in parts.layers for product in layer.projections]
        self.projections += [parts.fuse, parts.head, *([parts.markov.product] if parts.markov else [])]
        self._parts, self._target, self._ops, self.device = parts, target, target.ops, target.device
        self._ones = torch.ones(c.hidden_size, device=target.device)
        # Cascaded layers are one decoder; the layers of the paper's ablation are parallel decoders.
        runs = [[layer] for layer in parts.layers] if parts.parallel else [parts.layers]
        columns = 2 * c.hidden_size if parts.halves else 0
        self._decoders = [self._ops.decoder(c, None, run, self._ones, range(1, len(run) + 1), columns) for run in runs]
        self._rope = RopeTables(c, target.device)
        self._fixed = FixedRows()

    @property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary tables of all positions so far."""
        return self._rope.cos_sin

    def native_draft(self, shape: _C.GrowthShape) -> NativeDraft | None:
        """Makes the one native call of a draft; None on CUDA and for parallel layers."""
        decoder, parts = self._decoders[0], self._parts
        if parts.parallel or not isinstance(decoder, Decoder):
            return None
        embedding_norm, hidden_state_norm = parts.halves or (None, None)
        weights = _C.FastEagleWeights(
            decoder.native,
            self._target.embedding.data,
            native_projection(parts.fuse),
            embedding_norm,
            hidden_state_norm,
            parts.head_norm,
            native_projection(parts.head),
            parts.markov.rank if parts.markov else 0,
            parts.markov.rows.data if parts.markov else None,
            native_projection(parts.markov.product if parts.markov else None),
            parts.vocabulary,
        )
        return NativeDraft(weights, shape)

    def native_rows(self, picked: torch.Tensor, rows: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns rows of picked hidden states as that draft takes them."""
        return picked, rows

    def draft(self, opened: Opened, levels: int) -> Steps:
        """Reads the pairs; then reads the head, once for all levels; a Markov head adds to each of them.

        Every layer runs, however few levels there are: the cache needs it.
        """
        outputs, markov = self._outputs(opened), self._parts.markov
        if markov is None:
            yield Logits(self._logits(outputs, levels, by_request=True), levels=levels)
            return
        logits = self._logits(outputs, levels, by_request=False).view(levels, len(outputs), -1)
        rows = yield Logits(logits[0])
        for own in logits[1:]:
            rows = yield Logits(own, self._after(rows.tokens, markov))

    def block_tokens(self, batch: int) -> None:
        """Returns nothing: it has no blocks."""

    def pick(self, hidden_states: HiddenStates) -> torch.Tensor:
        """Returns those of the target's hidden states that it reads, float32 [M, hidden_state_layers, hidden]."""
        assert hidden_states.at_layers is not None  # see hidden_state_layers
        return hidden_states.at_layers

    def picked_shape(self, hidden_state_layers: int) -> tuple[int, ...]:
        """Returns the shape of one position of pick()."""
        return (hidden_state_layers, self.config.hidden_size)

    @property
    def kept_dtype(self) -> torch.dtype:
        """The fusing product's, where it reads them as they lie."""
        return self._ops.layer.dtype_for(self._parts.fuse) if self._parts.halves else torch.float32

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    def _logits(self, outputs: torch.Tensor, levels: int, *, by_request: bool) -> torch.Tensor:
        """Returns float32 [B * levels, Vd] of the first levels of outputs [B, L, hidden]; by_request: as Logits."""
        batch, layers, _ = outputs.shape
        rows, read = outputs.flatten(0, 1), [[b * layers + level for level in range(levels)] for b in range(batch)]
        places = [place for own in (read if by_request else zip(*read, strict=True)) for place in own]
        if places != [*range(len(rows))]:
            rows = self._fixed.take(rows, places)
        if self._parts.head_norm is not None:
            rows = self._normed(rows, self._parts.head_norm, self._ops.layer.dtype_for(self.head))
        return self._ops.linear(rows, self.head)

    def _after(self, tokens: torch.Tensor, markov: Markov) -> torch.Tensor:
        """Returns what a Markov head adds to the logits of a level, float32 [B, Vd].

        tokens: int32 [B], the target's, of the level above; -1 of a request without a draft.
        """
        columns = tokens if self.columns.index is None else self.columns.index[tokens]
        rows = torch.empty(len(tokens), markov.rank, device=self.device)
        self._ops.layer.gather_rows(markov.rows, columns.clamp(min=0), rows)
        return self._ops.linear(rows, markov.product)

    def _outputs(self, opened: Opened) -> torch.Tensor:
        """Caches pairs; returns the layers' outputs [B, L, hidden] at every request's last pair, for the head."""
        dtype = None if self._parts.head_norm is not None else self._ops.layer.dtype_for(self.head)
        layers = self.levels // len(self._decoders)
        at_layers = [torch.empty(len(opened.pairs), layers, self.config.hidden_size, device=self.device)]
        at_layers += [torch.empty_like(at_layers[0]) for _ in self._decoders[1:]]
        self._pass(opened.rows, opened.pairs, opened.place, opened.pool, at_layers)
        outputs = [take_rows(each, opened.last, dtype) for each in at_layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def cache_pairs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> None:
        """Caches pairs. The last layer's keys need the outputs of all layers before it, but not its own."""
        self._pass(read.rows, read.hidden_states, place, pool, None)

    def _pass(
        self,
        rows: Rows,
        pairs: torch.Tensor,
        place: CacheBatch,
        pool: PagePool,
        at_layers: list[torch.Tensor] | None,
    ) -> None:
        """Runs all decoders. at_layers: float32 [M, layers, hidden] of each, written; None: only the cache is."""
        inputs, halves = self._inputs(rows.tokens, pairs)
        if self._ops.on_device and len(self._decoders) == 1:
            inputs = inputs[:, None]  # they become the stream
        layers = self.levels // len(self._decoders)
        for number, decoder in enumerate(self._decoders):
            own = slice(number * layers, (number + 1) * layers)
            caches = (pool.k[own], pool.v[own], place.block_table, place.lengths)
            written = None if at_layers is None else at_layers[number]
            decoder(rows, *caches, *self._rope.cos_sin, written, inputs, halves, only_cache=written is None)

    def _inputs(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns rows [M, hidden] for the first layer, and the two halves that it reads in their place, if it does."""
        parts, layer_ops, on_device = self._parts, self._ops.layer, self._ops.on_device
        if parts.halves:
            fused, embedding = self._ops.linear(states.flatten(1), parts.fuse), self._target.embedding
            halves: Halves
            if on_device:
                halves = HalvesInOneKernel(embedding, tokens, fused, None, layer_ops, self.config.rms_norm_eps)
            else:
                halves = HalvesByOps(self._embedded(tokens), fused, self._normed)
            return fused, halves.join(parts.halves, parts.layers[0].qkv)
        normed = self._normed(states.flatten(0, 1), self._ones).view(len(tokens), -1)
        embedded = self._embedded(tokens)
        if on_device:
            return self._ops.linear(join_rows(normed, embedded, layer_ops.dtype_for(parts.fuse)), parts.fuse), None
        return self._ops.linear(join_columns([normed, embedded]), parts.fuse), None

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(tokens), self.config.hidden_size, device=self.device)
        self._ops.layer.gather_rows(self._target.embedding, tokens, out)
        return out

    def _normed(self, rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.empty_like(rows, dtype=dtype)
        self._ops.layer.rms_norm(rows, None, weight, out, self.config.rms_norm_eps)
        return out
