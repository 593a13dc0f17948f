"""A FastEagle network's parts from its checkpoint: the paper's, and those that some checkpoints have beside them.

An own output head, a Markov head (a level's logits get a product of low rank that knows the token of the level above;
DSpark), and EAGLE-3's entry, whose first layer reads [embedding | fused hidden states] side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specengine.models.checkpoint_base import layer_tensors
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.decoder import Layer
from specengine.ops.weight import Projection, Weight
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Markov:
    """The product that adds product @ rows[token above] to a level's logits. rank: columns of both."""

    rows: Weight
    rank: int
    product: Projection


@dataclass(frozen=True)
class FastEagleParts:
    """What a FastEagleNetwork runs.

    config: of the layers in use.  parallel: every layer reads the first input.
    hidden_state_layers: of the target.  fuse: makes a row of the hidden states and, without halves, of the embedding.
    halves: norms of the embedding and of the fused hidden state that the first layer reads side by side; None: it
    reads one row.  head_norm: before the head; None: there is none.  vocabulary: int32 [Vd], the target's tokens.
    """

    config: ModelConfig
    parallel: bool
    hidden_state_layers: tuple[int, ...]
    layers: Sequence[Layer]
    fuse: Projection
    halves: tuple[torch.Tensor, torch.Tensor] | None
    head_norm: torch.Tensor | None
    head: Projection
    markov: Markov | None
    vocabulary: torch.Tensor | None


def load_fasteagle(checkpoint: DraftCheckpoint, target: Transformer, dtype: str, levels: int = 0) -> FastEagleParts:
    """Loads the first `levels` layers; 0: all. Raises ValueError naming the part that does not fit the target."""
    whole = checkpoint.layer_config()
    config = replace(whole, num_layers=levels or whole.num_layers)
    check_range("levels", config.num_layers, 1, whole.num_layers)
    hidden_state_layers = checkpoint.hidden_state_layers(target.config)
    side_by_side, parallel = _entry(checkpoint), checkpoint.fields.get("parallel", bool, False)
    if side_by_side and parallel:
        raise checkpoint.fields.error("entry", "must not be 'concat' where the layers are parallel")
    tokens = checkpoint.vocabulary(target.config)
    vocabulary = None if tokens is None else tokens.int().to(target.device)
    own_head = "lm_head.weight" in checkpoint.tensors
    size = target.config.vocab_size if tokens is None else len(tokens)
    _check(checkpoint, whole, len(hidden_state_layers), size, side_by_side=side_by_side)
    loader = WeightLoader(checkpoint, target.draft_dtype(dtype), target.device, target.ops)
    # Positions may exceed the trained length; distances may not.
    layers = [loader.layer_at(f"layers.{i}", checkpoint.attention_reach) for i in range(config.num_layers)]
    halves = None
    if side_by_side:
        embedding_norm = layers[0].attention_norm
        assert embedding_norm is not None  # see _check
        halves = embedding_norm, loader.vector("layers.0.hidden_norm.weight")
        layers[0] = replace(layers[0], attention_norm=None)
        fuse = loader.linear("fc_features")
    else:
        fuse = loader.packed(_fused(checkpoint, whole.hidden_size, len(hidden_state_layers)), "fc_input")
    markov = None
    if "markov_w1.weight" in checkpoint.tensors:
        (rows,) = loader.linear("markov_w1").weights
        markov = Markov(rows, checkpoint.tensors["markov_w1.weight"].shape[1], loader.linear("markov_w2"))
    return FastEagleParts(
        config=config,
        parallel=parallel,
        hidden_state_layers=hidden_state_layers,
        layers=layers,
        fuse=fuse,
        halves=halves,
        head_norm=loader.vector_if_any("norm.weight"),
        head=loader.linear("lm_head") if own_head else target.head_rows(vocabulary),
        markov=markov,
        vocabulary=vocabulary,
    )


def _entry(checkpoint: DraftCheckpoint) -> bool:
    """Returns whether the first layer reads two halves side by side."""
    entry = checkpoint.fields.get("entry", str, "sum")
    if entry not in ("sum", "concat"):
        raise checkpoint.fields.error("entry", f"must be 'sum' or 'concat', got {entry!r}")
    return entry == "concat"


def _check(checkpoint: DraftCheckpoint, c: ModelConfig, states: int, vocabulary: int, *, side_by_side: bool) -> None:
    """Checks all tensors but d2t. vocabulary: the drafter's tokens."""
    size = c.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc_features.weight": (size, states * size)}
    if not side_by_side:
        shapes |= {"fc_input.weight": (size, 2 * size)} | {f"fc_norm.{i}.weight": (size,) for i in range(states)}
    for i in range(c.num_layers):
        shapes |= layer_tensors(c, f"layers.{i}.")
    if side_by_side:
        for part, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            shapes[f"layers.0.self_attn.{part}_proj.weight"] = (heads * c.head_dim, 2 * size)
        shapes["layers.0.hidden_norm.weight"] = (size,)
    optional: dict[str, tuple[int, ...]] = {"norm.weight": (size,), "lm_head.weight": (vocabulary, size)}
    markov = ("markov_w1.weight", "markov_w2.weight")
    if any(name in checkpoint.tensors for name in markov):
        checkpoint.rows(markov[0])
        shapes |= dict.fromkeys(markov, (vocabulary, checkpoint.tensors[markov[0]].shape[1]))
    checkpoint.expect_all(shapes | {name: shape for name, shape in optional.items() if name in checkpoint.tensors})


def _fused(checkpoint: DraftCheckpoint, size: int, states: int) -> torch.Tensor:
    """Returns fc_input of fc_features of the normed hidden states, and of the embedding, as one matrix.

    It is [hidden, (states + 1) hidden]. No non-linearity lies between the two matrices, so they are multiplied once;
    the norms' weights scale the columns.
    """

    def floats(name: str) -> torch.Tensor:
        return checkpoint.read(f"{name}.weight").float()

    both = floats("fc_input")
    scale = torch.cat([floats(f"fc_norm.{i}") for i in range(states)])
    return torch.cat([both[:, :size] @ (floats("fc_features") * scale), both[:, size:]], dim=1)
