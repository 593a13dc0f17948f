"""FastEagle's network. Layer i reads layer i - 1's output and its own cache.

The first layer reads the fused hidden states of a position and the embedding of the token after it. Every layer's
output is a guess of the target's last hidden state, one token further.
"""

from __future__ import annotations

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.hidden_states.pairs import PairRows
from specengine.models.checkpoint_base import layer_tensors
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.hidden_states import HiddenStates
from specengine.models.rope import RopeTables
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.row_tools import take_rows


class Cascade:
    """Runs the network of a checkpoint beside its target.

    head: the target's, of the drafter's vocabulary.  projections: its linear layers.
    Raises ValueError naming the part of the checkpoint that does not fit the target.
    """

    def __init__(self, checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> None:
        self.config = c = checkpoint.layer_config()
        self.levels = c.num_layers
        size = c.hidden_size
        self.hidden_state_layers = checkpoint.hidden_state_layers(target.config)
        checkpoint.expect("fc_features.weight", size, len(self.hidden_state_layers) * size)
        checkpoint.expect("fc_input.weight", size, 2 * size)
        for i in range(len(self.hidden_state_layers)):
            checkpoint.expect(f"fc_norm.{i}.weight", size)
        for i in range(self.levels):
            checkpoint.expect_all(layer_tensors(c, f"layers.{i}."))
        if "norm.weight" in checkpoint.tensors:
            checkpoint.expect("norm.weight", size)
        loader = WeightLoader(checkpoint, target.draft_dtype(dtype), target.device, target.ops)
        # Positions may exceed the trained length; distances may not.
        layers = [loader.layer_at(f"layers.{i}", checkpoint.attention_reach) for i in range(self.levels)]
        self.projections = [product for layer in layers for product in layer.projections]
        self._target, self._ops, self.device = target, target.ops, target.device
        self._fusion = loader.packed(self._fused(checkpoint), "fc_input")
        self._ones = torch.ones(size, device=target.device)
        self._norm = loader.vector_if_any("norm.weight")
        # Cascaded layers are one decoder; the layers of the paper's ablation are parallel decoders.
        runs = [[layer] for layer in layers] if checkpoint.fields.get("parallel", bool, False) else [layers]
        self._decoders = [self._ops.decoder(c, None, run, self._ones, range(1, len(run) + 1)) for run in runs]
        vocabulary = checkpoint.vocabulary(target.config)
        self._vocabulary = None if vocabulary is None else vocabulary.int().to(target.device)
        self.head = target.head_rows(self._vocabulary)
        self.projections += [self._fusion, self.head]
        self._rope = RopeTables(c, target.device)

    def _fused(self, checkpoint: DraftCheckpoint) -> torch.Tensor:
        """Returns fc_input of fc_features of the normed hidden states, and of the embedding, as one matrix.

        It is [hidden, (hidden_state_layers + 1) hidden]. No non-linearity lies between the two matrices, so they are
        multiplied once; the norms' weights scale the columns.
        """

        def floats(name: str) -> torch.Tensor:
            return checkpoint.read(f"{name}.weight").float()

        size = self.config.hidden_size
        both = floats("fc_input")
        scale = torch.cat([floats(f"fc_norm.{i}") for i in range(len(self.hidden_state_layers))])
        return torch.cat([both[:, :size] @ (floats("fc_features") * scale), both[:, size:]], dim=1)

    def pick(self, hidden_states: HiddenStates) -> torch.Tensor:
        """Returns those of the target's hidden states that it reads, float32 [M, hidden_state_layers, hidden]."""
        assert hidden_states.at_layers is not None  # see hidden_state_layers
        return hidden_states.at_layers

    def picked_shape(self, hidden_state_layers: int) -> tuple[int, ...]:
        """Returns the shape of one position of pick()."""
        return (hidden_state_layers, self.config.hidden_size)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the target's ids of the drafter's tokens; -1 stays."""
        return tokens if self._vocabulary is None else torch.where(tokens < 0, tokens, self._vocabulary[tokens.long()])

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns logits float32 [M, draft vocabulary] of layers' outputs [M, hidden]."""
        if self._norm is not None:
            outputs, rows = torch.empty_like(outputs), outputs.contiguous()
            self._ops.layer.rms_norm(rows, None, self._norm, outputs, self.config.rms_norm_eps)
        return self._ops.linear(outputs.contiguous(), self.head)

    def outputs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> torch.Tensor:
        """Caches pairs; returns the layers' outputs [B, levels, hidden] at every request's last pair."""
        inputs = self._inputs(read)
        outputs: list[torch.Tensor] = []
        first = 0
        for decoder in self._decoders:
            layers = self.levels // len(self._decoders)
            own = slice(first, first + layers)
            first += layers
            at_layers = torch.empty(len(inputs), layers, self.config.hidden_size, device=inputs.device)
            caches = (pool.k[own], pool.v[own], place.block_table, place.lengths)
            decoder(read.rows, *caches, *self._rope.cos_sin, at_layers, inputs)
            outputs.append(take_rows(at_layers, read.last))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def cache_pairs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> None:
        """Caches pairs. The last layer's keys need the outputs of all layers before it."""
        self.outputs(read, place, pool)

    def _inputs(self, read: PairRows) -> torch.Tensor:
        """Returns rows [M, hidden] for the first layer."""
        rows, hidden_state_layers, size = read.hidden_states.shape
        normed = torch.empty(rows * hidden_state_layers, size, device=read.hidden_states.device)
        self._ops.layer.rms_norm(read.hidden_states.flatten(0, 1), None, self._ones, normed, self.config.rms_norm_eps)
        embedded = torch.empty(rows, size, device=normed.device)
        self._ops.layer.gather_rows(self._target.embedding, read.rows.tokens, embedded)
        return self._ops.linear(torch.cat([normed.view(rows, -1), embedded], dim=1), self._fusion)
