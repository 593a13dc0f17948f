"""GLIDE: a small LLaMA whose layers also read the target's cached keys and values (sections 3.1 and 3.2).

Row t reads token t and guesses token t + 1. While it drafts, the target's cache ends somewhere before: in training, at
the beginning of its block of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specengine.models.config import ModelConfig
from specengine.models.rope import rope_tables
from specengine.train.objectives.base import Frozen, LevelReport, Objective, TrainingBatch
from specengine.train.objectives.llama_layer import DecoderLayer, LayerShape, RMSNorm, rotated
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_layers import layer_json, shape_of, spread, start_from
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """layers: of the drafter, beside as many of the target's last.  block: rows that see the same part of the target's
    cache.  cross: false leaves the target's cache out.  soft: learn the target's distribution instead of the token that
    was written.  own: embedding and head are trained too, else they are the target's.  levels: reported.
    warm_start: layers begin as some of the target's."""

    layers: int = 1
    block: int = 5
    cross: bool = True
    soft: bool = True
    own: bool = False
    levels: int = 4
    warm_start: bool = True

    def __post_init__(self) -> None:
        check_range("layers", self.layers, 1, 32)
        check_range("block", self.block, 1, 1 << 16)
        check_range("levels", self.levels, 1, 32)


class CrossAttention(nn.Module):
    """Attention of a drafter's row over the target's keys and values; the query turns as the target's own do."""

    def __init__(self, shape: LayerShape, target: ModelConfig) -> None:
        super().__init__()
        self.target = target
        width = target.num_heads * target.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    @torch.no_grad()
    def start_from(self, frozen: Frozen, number: int) -> None:
        """Asks as the target's layer of this number does, were a row as large as an embedding; adds nothing yet."""
        norm = frozen.read(f"model.layers.{number}.input_layernorm.weight")
        scale = norm / frozen.embedding.float().square().mean().sqrt()
        self.q_proj.weight.copy_(frozen.read(f"model.layers.{number}.self_attn.q_proj.weight") * scale)
        self.o_proj.weight.zero_()

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x: [B, T, hidden].  keys, values: [B, K, T, D].  mask: bool [T, T], what may be attended."""
        q = self.q_proj(x).unflatten(-1, (-1, self.target.head_dim)).transpose(1, 2)
        q = rotated(q, *(table.to(x.device) for table in rope_tables(self.target, x.shape[1])))
        mixed = functional.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), mask, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GlideLayer(DecoderLayer):
    """target: whose cache is read, between attention and MLP; None: none is."""

    def __init__(self, shape: LayerShape, target: ModelConfig | None) -> None:
        super().__init__(shape)
        if target is not None:
            self.cross_attn = CrossAttention(shape, target)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, seen: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        """seen: keys, values and mask of CrossAttention; empty without a target."""
        x = x + self.self_attn(self.input_layernorm(x), positions)
        if seen:
            x = x + self.cross_attn(x, *seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Model(nn.Module):
    """What published names call `model`."""

    embed_tokens: nn.Embedding

    def __init__(self, layers: Iterable[GlideLayer], norm: RMSNorm) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm


class Glide(nn.Module):
    """own: rows of an embedding and of a head of its own, [V, hidden] and [V', hidden] to begin with."""

    def __init__(
        self, shape: LayerShape, layers: int, target: ModelConfig | None, own: tuple[torch.Tensor, ...] = ()
    ) -> None:
        super().__init__()
        norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.model = _Model((GlideLayer(shape, target) for _ in range(layers)), norm)
        if own:
            embedding, head = own
            self.model.embed_tokens = nn.Embedding.from_pretrained(embedding.clone(), freeze=False)
            self.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False)
            self.lm_head.weight.data.copy_(head)

    def forward(
        self,
        embedded: torch.Tensor,
        keys: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normed states [B, T, hidden] of embedded tokens [B, T, hidden].

        keys, values: [layers, B, K, T, D] of the target.  mask: bool [T, T], what of them may be attended.
        """
        x, positions = embedded, torch.arange(embedded.shape[1], device=embedded.device)
        for m, layer in enumerate(self.model.layers):
            x = layer(x, positions, () if keys is None or values is None else (keys[m], values[m], mask))
        return self.model.norm(x)


def block_mask(rows: int, block: int, device: torch.device | None = None) -> torch.Tensor:
    """bool [rows, rows]: row i may attend the target's position j of an earlier block; the first block, which has none
    before it, those up to i."""
    position = torch.arange(rows, device=device)
    number = position // block
    return (number[:, None] > number) | ((number[:, None] == 0) & (position <= position[:, None]))


class GlideObjective(Objective):
    """Cross-entropy of the next token, with the target's cache as stale as in a cycle."""

    name = "glide"
    options_type = Options
    network: Glide
    learning_rate = 5e-4

    def __init__(self, frozen: Frozen, options: Options) -> None:
        config = frozen.config
        self.check(config, options)
        self.frozen, self.options = frozen, options
        own = (frozen.embedding, frozen.head) if options.own else ()
        target = config if options.cross else None
        self.network = Glide(shape_of(config), options.layers, target, own).to(frozen.head.device)
        if options.cross:
            self.kv_layers = tuple(range(config.num_layers - options.layers, config.num_layers))
        if options.warm_start:
            with torch.no_grad():
                self.network.model.norm.weight.copy_(frozen.read("model.norm.weight"))
            for layer, number in zip(self.network.model.layers, spread(options.layers, config), strict=True):
                start_from(layer, frozen, number)
            for layer, number in zip(self.network.model.layers, self.kv_layers, strict=True) if options.cross else ():
                assert isinstance(layer, GlideLayer)
                layer.cross_attn.start_from(frozen, number)

    @classmethod
    def check(cls, config: ModelConfig, options: Options) -> None:
        """See Objective."""
        check_range("drafter: layers", options.layers, 1, config.num_layers)

    def rate_of(self, name: str) -> float:
        """Slow where the target's values enter: they are ten times as large as the rows that they are added to."""
        return 0.1 if name.endswith("cross_attn.o_proj.weight") else 1.0

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        own = self.options.own
        mask = block_mask(batch.tokens.shape[1], self.options.block, batch.tokens.device)
        embedded = self.network.model.embed_tokens(batch.tokens) if own else self.frozen.embed(batch.tokens)
        states = (
            self.network(embedded, batch.keys, batch.values, mask) if self.options.cross else self.network(embedded)
        )
        targets = SoftTargets(batch, self.frozen, hard=not self.options.soft)
        loss, guesses = targets.compare(0, states, self.network.lm_head.weight if own else self.frozen.head)
        return loss, targets.report(loss, guesses, self.options.levels)

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; `large_` tells of the target whose cache is read."""
        config, options = self.frozen.config, self.options
        json = layer_json(config, options.layers, "GlideForCausalLM")
        json |= {
            "draft_vocab_size": len(self.frozen.head),
            "block_size": options.block,
            "cross_attention": options.cross,
        }
        if options.cross:
            json |= {
                "large_hidden_size": config.hidden_size,
                "large_num_hidden_layers": config.num_layers,
                "large_num_attention_heads": config.num_heads,
                "large_num_key_value_heads": config.num_kv_heads,
                "large_head_dim": config.head_dim,
            }
        tensors = {name: x.detach() for name, x in self.network.state_dict().items()}
        return json, tensors | self.frozen.vocabulary_tensors()
