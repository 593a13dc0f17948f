"""FastEagle's network. Layer i reads layer i - 1's output and its own cache.

The first layer reads the fused hidden states of a position and the embedding of the token after it. Every layer's
output is a guess of the target's last hidden state, one token further.
"""

from __future__ import annotations

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.fasteagle.checkpoint import CascadeParts
from specengine.drafters.fasteagle.native_draft import CascadeDraft, CascadeNetwork
from specengine.drafters.hidden_states.halves import Halves, HalvesByOps, HalvesInOneKernel
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.models.transformer import Transformer
from specengine.ops.decoder import Decoder
from specengine.ops.growth.row_inputs import join_rows
from specengine.ops.row_tools import FixedRows, join_columns, take_rows


class Cascade:
    """Runs the network of a checkpoint beside its target.

    head: of the drafter's vocabulary.  projections: its linear layers.  levels: one per layer.
    """

    def __init__(self, parts: CascadeParts, target: Transformer) -> None:
        self.config = c = parts.config
        self.levels = c.num_layers
        self.hidden_state_layers = parts.hidden_state_layers
        self.head = parts.head
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

    def native_draft(self, top_k: int) -> CascadeDraft | None:
        """Makes the one native call of a draft; None on CUDA and for parallel layers."""
        decoder, parts = self._decoders[0], self._parts
        if parts.parallel or not isinstance(decoder, Decoder):
            return None
        network = CascadeNetwork(
            decoder,
            self._target.embedding,
            parts.fuse,
            parts.halves,
            parts.head_norm,
            parts.head,
            parts.markov,
            parts.vocabulary,
        )
        return CascadeDraft(network, top_k)

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

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """The target's token of each of the drafter's, int32; None: they are the same."""
        return self._parts.vocabulary

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the target's ids of the drafter's tokens; -1 stays."""
        vocabulary = self._parts.vocabulary
        return tokens if vocabulary is None else torch.where(tokens < 0, tokens, vocabulary[tokens.long()])

    def logits(self, outputs: torch.Tensor, levels: int) -> torch.Tensor:
        """Returns logits float32 [B, levels, draft vocabulary] of the first levels of outputs [B, L, hidden].

        Each level continues the likeliest token of the one above.
        """
        if levels < outputs.shape[1]:
            batch, layers, _ = outputs.shape
            picked = [b * layers + level for b in range(batch) for level in range(levels)]
            outputs = self._fixed.take(outputs.flatten(0, 1), picked).view(batch, levels, -1)
        logits = self.lone_logits(outputs)
        for level in range(1, logits.shape[1] if self._parts.markov else 0):
            self.follow(logits[:, level], logits[:, level - 1].argmax(-1).int())
        return logits

    def lone_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns what logits() does, of levels that know no token of the one above."""
        batch, levels, _ = outputs.shape
        rows = outputs.flatten(0, 1)
        if self._parts.head_norm is not None:
            rows = self._normed(rows, self._parts.head_norm, self._ops.layer.dtype_for(self.head))
        return self._ops.linear(rows, self.head).view(batch, levels, -1)

    def follow(self, logits: torch.Tensor, above: torch.Tensor) -> None:
        """Adds to a level's logits [B, draft vocabulary] what a Markov head knows by the tokens above.

        above: int32 [B], the drafter's tokens.
        """
        if (markov := self._parts.markov) is not None:
            rows = torch.empty(len(above), markov.rank, device=self.device)
            self._ops.layer.gather_rows(markov.rows, above, rows)
            logits += self._ops.linear(rows, markov.product)

    def outputs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> torch.Tensor:
        """Caches pairs; returns the layers' outputs [B, levels, hidden] at every request's last pair, for logits()."""
        dtype = None if self._parts.head_norm is not None else self._ops.layer.dtype_for(self.head)
        layers = self.levels // len(self._decoders)
        at_layers = [torch.empty(len(read.rows.tokens), layers, self.config.hidden_size, device=self.device)]
        at_layers += [torch.empty_like(at_layers[0]) for _ in self._decoders[1:]]
        self._pass(read, place, pool, at_layers)
        outputs = [take_rows(each, read.last, dtype) for each in at_layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def cache_pairs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> None:
        """Caches pairs. The last layer's keys need the outputs of all layers before it, but not its own."""
        self._pass(read, place, pool, None)

    def _pass(self, read: PairRows, place: CacheBatch, pool: PagePool, at_layers: list[torch.Tensor] | None) -> None:
        """Runs all decoders. at_layers: float32 [M, layers, hidden] of each, written; None: only the cache is."""
        inputs, halves = self._inputs(read)
        if self._ops.on_device and len(self._decoders) == 1:
            inputs = inputs[:, None]  # they become the stream
        layers = self.levels // len(self._decoders)
        for number, decoder in enumerate(self._decoders):
            own = slice(number * layers, (number + 1) * layers)
            caches = (pool.k[own], pool.v[own], place.block_table, place.lengths)
            written = None if at_layers is None else at_layers[number]
            decoder(read.rows, *caches, *self._rope.cos_sin, written, inputs, halves, only_cache=written is None)

    def _inputs(self, read: PairRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns rows [M, hidden] for the first layer, and the two halves that it reads in their place, if it does."""
        tokens, parts, layer_ops = read.rows.tokens, self._parts, self._ops.layer
        states, on_device = read.hidden_states, self._ops.on_device
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
