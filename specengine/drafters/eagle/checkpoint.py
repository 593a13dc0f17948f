"""EAGLE drafters from their checkpoints, in every layout that is known: names, optional norms, reduced vocabularies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine.drafters.eagle.network import Eagle1Layers, Eagle3Layers, Eagle3Norms, EagleLayers
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.weight import Projection

# name in the wild -> name here; the last two are the speculators library's for EAGLE-1
_RENAMED = (
    (r"^model\.", ""),
    (r"^midlayer\.(\d+)\.", r"layers.\1."),
    (r"^midlayer\.", "layers.0."),
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
)
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|^t2d$|^verifier_|^target_model\.")  # what drafting does not read


@dataclass(frozen=True)
class EagleDrafter:
    """A drafter's network and what it has to do with its target.

    hidden_state_layers: layers of the target whose input it reads.  tokens: int32 [Vd], the target's token of each of the drafter's
    own; None: they are the same.
    """

    layers: EagleLayers
    hidden_state_layers: tuple[int, ...]
    tokens: torch.Tensor | None


def load_eagle1(checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> EagleDrafter:
    """EAGLE-1 or -2. Raises ValueError naming what does not fit the target, or is missing or unexpected."""
    parts = _Parts(checkpoint, target, dtype)
    if "d2t" in parts.checkpoint.tensors or "layers.0.hidden_norm.weight" in parts.checkpoint.tensors:
        raise checkpoint.error("is an EAGLE-3 drafter; use eagle3:PATH")
    if parts.hidden != target.config.hidden_size:
        raise checkpoint.error(f"hidden_size is {parts.hidden}, the target's is {target.config.hidden_size}")
    parts.checkpoint.expect("fc.weight", parts.hidden, 2 * parts.hidden)
    parts.expect_layers(first_columns=parts.hidden, first_norms=())
    parts.ignore("lm_head.weight")  # a copy of the target's
    parts.expect_nothing_else("fc.bias", "layers.0.input_layernorm.weight")
    layers = Eagle1Layers(parts.loader.linear("fc"), *parts.common(target.head))
    return EagleDrafter(layers, (), None)


def load_eagle3(
    checkpoint: DraftCheckpoint, target: Transformer, dtype: str, hidden_state_layers: Sequence[int] = ()
) -> EagleDrafter:
    """EAGLE-3. hidden_state_layers: layers of the target, instead of those the checkpoint names. Raises as load_eagle1."""
    parts = _Parts(checkpoint, target, dtype)
    tensors, hidden = parts.checkpoint.tensors, parts.hidden
    if "layers.0.hidden_norm.weight" not in tensors:
        raise checkpoint.error("tensor 'midlayer.hidden_norm.weight' is missing; is this EAGLE-1 or -2 (eagle:PATH)?")
    if "fc.weight" not in tensors and hidden != target.config.hidden_size:
        raise checkpoint.error(f"tensor 'fc.weight' is missing, and hidden_size {hidden} is not the target's")
    order = _feature_layers(parts, target, hidden_state_layers) if "fc.weight" in tensors else []
    parts.expect_layers(first_columns=2 * hidden, first_norms=("input_layernorm", "hidden_norm"))
    parts.checkpoint.expect("norm.weight", hidden)
    tokens, head = parts.vocabulary(target)
    each = [f"fc_norm.{i}.weight" for i in range(len(order))]
    each = each if each and each[0] in tensors else []
    width = len(order) * target.config.hidden_size
    for name, size in (("input_norm.weight", width), *((name, target.config.hidden_size) for name in each)):
        if name in tensors:
            parts.checkpoint.expect(name, size)
    parts.expect_nothing_else("fc.bias", "norm.weight", "d2t", "lm_head.weight", "input_norm.weight", *each)
    loader, fields = parts.loader, parts.checkpoint.fields
    norms = Eagle3Norms(
        embedding=loader.vector("layers.0.input_layernorm.weight"),
        feature=loader.vector("layers.0.hidden_norm.weight"),
        out=loader.vector("norm.weight"),
        all_taps=loader.vector_if_any("input_norm.weight"),
        each_tap=tuple(loader.vector(name) for name in each),
        before_residual=fields.get("norm_before_residual", bool, False),
        feed_back=fields.get("norm_output", bool, False),
    )
    rising = tuple(sorted(set(order)))
    fc = loader.linear("fc") if order else None
    layers = Eagle3Layers([rising.index(layer) for layer in order], norms, fc, *parts.common(head))
    return EagleDrafter(layers, rising, tokens)


class _Parts:
    """What the layouts share: names, sizes, layers, embedding, head."""

    def __init__(self, checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> None:
        self.checkpoint = checkpoint.renamed(_name_here)
        self.target, self.config = target, self.checkpoint.layer_config()
        self.hidden = self.config.hidden_size
        self.loader = WeightLoader(self.checkpoint, dtype, target.device, target.ops)
        self._known: set[str] = set()
        ours, theirs = self.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise checkpoint.error(f"vocab_size is {ours}, the target's is {theirs}")
        wanted = self.checkpoint.fields.get("target_hidden_size", int, target.config.hidden_size)
        if wanted != target.config.hidden_size:
            raise checkpoint.error(f"target_hidden_size is {wanted}, the target's is {target.config.hidden_size}")

    def ignore(self, *names: str) -> None:
        self._known |= set(names)

    def expect_layers(self, first_columns: int, first_norms: tuple[str, ...]) -> None:
        """Checks the tensors of all layers; first_columns: what the first layer's q, k and v read."""
        config = self.config
        for number in range(config.num_layers):
            norms = (*(first_norms if number == 0 else ("input_layernorm",)), "post_attention_layernorm")
            for name, shape in layer_shapes(config, self.hidden if number else first_columns, norms).items():
                full = f"layers.{number}.{name}"
                if not name.endswith(".bias") or full in self.checkpoint.tensors:
                    self.checkpoint.expect(full, *shape)
                self._known.add(full)

    def expect_nothing_else(self, *names: str) -> None:
        """A tensor that nobody reads means arithmetic that is not known here."""
        known = {*self._known, *names, "fc.weight", "embed_tokens.weight"}
        for name in self.checkpoint.tensors:
            if name not in known and not _IGNORED.search(name):
                raise self.checkpoint.error(f"tensor '{name}' is unexpected, this layout is not known")

    def vocabulary(self, target: Transformer) -> tuple[torch.Tensor | None, Projection]:
        """The target's tokens of the drafter's, and its head."""
        tensors, vocab = self.checkpoint.tensors, target.config.vocab_size
        if "t2d" in tensors:
            self.checkpoint.expect("t2d", vocab)
        if "lm_head.weight" not in tensors:
            if "d2t" in tensors or self.hidden != target.config.hidden_size:
                raise self.checkpoint.error("tensor 'lm_head.weight' is missing")
            return None, target.head
        tokens, rows = self.checkpoint.vocabulary(target.config), self.checkpoint.rows("lm_head.weight")
        if tokens is None and rows != vocab:
            raise self.checkpoint.error(
                f"tensor 'd2t' is missing, though the head has {rows} tokens and the target {vocab}"
            )
        self.checkpoint.expect("lm_head.weight", vocab if tokens is None else len(tokens), self.hidden)
        head = self.loader.linear("lm_head")
        return None if tokens is None else tokens.int().to(target.device), head

    def common(self, head: Projection) -> tuple:
        """The arguments that all networks take."""
        if "embed_tokens.weight" in self.checkpoint.tensors:
            self.checkpoint.expect("embed_tokens.weight", self.target.config.vocab_size, self.hidden)
            embedding = self.loader.linear("embed_tokens").weights[0]
        elif self.hidden == self.target.config.hidden_size:
            embedding = self.target.embedding
        else:
            raise self.checkpoint.error(
                f"tensor 'embed_tokens.weight' is missing, and hidden_size {self.hidden} is not the target's "
                f"{self.target.config.hidden_size}, so its embedding does not fit"
            )
        reach, count = self.checkpoint.attention_reach, self.config.num_layers
        layers = [self.loader.layer_at(f"layers.{number}", reach) for number in range(count)]
        size = self.target.config.hidden_size
        return self.config, layers, embedding, head, size, self.target.ops, self.target.device


def layer_shapes(config: ModelConfig, columns: int, norms: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's tensors with every bias; columns: of q, k and v."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, columns),
        "self_attn.k_proj": (keys, columns),
        "self_attn.v_proj": (keys, columns),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _name_here(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _feature_layers(parts: _Parts, target: Transformer, hidden_state_layers: Sequence[int]) -> list[int]:
    """The layers whose input fc reads, in the order of its columns."""
    fields, count, width = parts.checkpoint.fields, target.config.num_layers, target.config.hidden_size
    listed = fields.get("eagle_aux_hidden_state_layer_ids", list, None)
    if listed is not None and any(type(layer) is not int for layer in listed):
        raise fields.error("eagle_aux_hidden_state_layer_ids", f"must be a list of layers, got {listed!r}")
    if hidden_state_layers:
        layers = list(hidden_state_layers)
    elif listed:
        # in an eagle_config, as SpecForge and ModelOpt write it, layers are numbered by their outputs
        grouped = fields.data.get("eagle_config")
        outputs = isinstance(grouped, dict) and "eagle_aux_hidden_state_layer_ids" in grouped
        layers = [layer + outputs for layer in listed]
    else:
        layers = [2, count // 2, count - 3]
    if any(not 0 <= layer <= count for layer in layers):
        raise parts.checkpoint.error(f"reads the input of layers {layers} of the target, which has {count}")
    shape, expected = parts.checkpoint.tensors["fc.weight"].shape, (parts.hidden, len(layers) * width)
    if shape != expected:
        raise parts.checkpoint.error(
            f"tensor 'fc.weight' has shape {shape}, expected {expected} for features of {len(layers)} layers of the "
            f"target's hidden size {width}"
        )
    return layers
