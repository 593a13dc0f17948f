"""FastEagle's network. Layer i reads layer i - 1's output and its own cache.

The first layer reads the fused hidden states of a position and the embedding of the token after it. Every layer's
output is a guess of the target's last hidden state, one token further. A checkpoint may have three more parts:
EAGLE-3's first layer, which reads normed embedding and normed fused states side by side (`entry` concat), a head of its
own, and a Markov head, from which a level's logits gain by the token of the level above.
"""

from __future__ import annotations

from dataclasses import replace

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
        parallel = checkpoint.fields.get("parallel", bool, False)
        self._concat = _concat(checkpoint, parallel)
        shapes = {name: shape for i in range(self.levels) for name, shape in layer_tensors(c, f"layers.{i}.").items()}
        if self._concat:
            first = {f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"}
            shapes |= {name: (shapes[name][0], 2 * size) for name in first}
            shapes["layers.0.hidden_norm.weight"] = (size,)
        else:
            shapes["fc_input.weight"] = (size, 2 * size)
            shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(len(self.hidden_state_layers))}
        vocabulary = checkpoint.vocabulary(target.config)
        tokens = target.config.vocab_size if vocabulary is None else len(vocabulary)
        optional = {"norm.weight": (size,), "lm_head.weight": (tokens, size)}
        markov = checkpoint.tensors.get("markov_w1.weight")
        if markov is not None:
            shapes |= dict.fromkeys(("markov_w1.weight", "markov_w2.weight"), (tokens, markov.shape[1]))
        checkpoint.expect_all(shapes | {x: shape for x, shape in optional.items() if x in checkpoint.tensors})
        loader = WeightLoader(checkpoint, dtype, target.device, target.ops)
        # Positions may exceed the trained length; distances may not.
        layers = [loader.layer_at(f"layers.{i}", checkpoint.attention_reach) for i in range(self.levels)]
        self.projections = [product for layer in layers for product in layer.projections]
        self._target, self._ops, self.device = target, target.ops, target.device
        self._halves: list[torch.Tensor] = []  # norms of embedding and fused states
        if self._concat:
            self._fusion = loader.linear("fc_features")
            self._halves = [loader.vector(f"layers.0.{x}.weight") for x in ("input_layernorm", "hidden_norm")]
            layers[0] = replace(layers[0], attention_norm=None)
        else:
            self._fusion = loader.packed(self._fused(checkpoint), "fc_input")
        self._ones = torch.ones(size, device=target.device)
        self._norm = loader.vector_if_any("norm.weight")
        # Cascaded layers are one decoder; the layers of the paper's ablation are parallel decoders.
        runs = [[layer] for layer in layers] if parallel else [layers]
        columns = 2 * size * self._concat
        self._decoders = [self._ops.decoder(c, None, run, self._ones, range(1, len(run) + 1), columns) for run in runs]
        self._vocabulary = None if vocabulary is None else vocabulary.int().to(target.device)
        own_head = "lm_head.weight" in checkpoint.tensors
        self.head = loader.linear("lm_head") if own_head else target.head_rows(self._vocabulary)
        self.projections += [self._fusion, self.head]
        self._above = None if markov is None else loader.vector("markov_w1.weight")
        self._bigram = None if markov is None else loader.linear("markov_w2")
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
        """Returns logits float32 [B, levels, draft vocabulary] of the first layers' outputs [B, levels, hidden]."""
        batch, levels, _ = outputs.shape
        rows = outputs.flatten(0, 1)
        if self._norm is not None:
            rows = self._normed(rows, self._norm)
        logits = self._ops.linear(rows.contiguous(), self.head).view(batch, levels, -1)
        if self._above is not None and self._bigram is not None:
            for level in range(1, levels):
                above = self._above[logits[:, level - 1].argmax(-1)]
                logits[:, level] += self._ops.linear(above, self._bigram)
        return logits

    def _normed(self, rows: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        self._ops.layer.rms_norm(rows, None, norm, out, self.config.rms_norm_eps)
        return out

    def outputs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> torch.Tensor:
        """Caches pairs; returns the layers' outputs [B, levels, hidden] at every request's last pair."""
        inputs, halves = self._inputs(read)
        outputs: list[torch.Tensor] = []
        first = 0
        for decoder in self._decoders:
            layers = self.levels // len(self._decoders)
            own = slice(first, first + layers)
            first += layers
            at_layers = torch.empty(len(inputs), layers, self.config.hidden_size, device=inputs.device)
            caches = (pool.k[own], pool.v[own], place.block_table, place.lengths)
            decoder(read.rows, *caches, *self._rope.cos_sin, at_layers, inputs, halves)
            outputs.append(take_rows(at_layers, read.last))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def cache_pairs(self, read: PairRows, place: CacheBatch, pool: PagePool) -> None:
        """Caches pairs. The last layer's keys need the outputs of all layers before it."""
        self.outputs(read, place, pool)

    def _inputs(self, read: PairRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns rows [M, hidden] for the first layer, and the two halves that it reads in their place, if any."""
        rows, _, size = read.hidden_states.shape
        embedded = torch.empty(rows, size, device=self.device)
        self._ops.layer.gather_rows(self._target.embedding, read.rows.tokens, embedded)
        if self._halves:
            fused = self._ops.linear(read.hidden_states.flatten(1), self._fusion)
            parts = zip((embedded, fused), self._halves, strict=True)
            return fused, torch.cat([self._normed(part, norm) for part, norm in parts], dim=1)
        normed = self._normed(read.hidden_states.flatten(0, 1), self._ones)
        return self._ops.linear(torch.cat([normed.view(rows, -1), embedded], dim=1), self._fusion), None


def _concat(checkpoint: DraftCheckpoint, parallel: bool) -> bool:
    """Returns whether the first layer reads two halves."""
    entry = checkpoint.fields.get("entry", str, "fused")
    if entry not in ("fused", "concat") or (parallel and entry == "concat"):
        raise checkpoint.fields.error("entry", f"must be 'fused', or 'concat' without 'parallel', got {entry!r}")
    return entry == "concat"
