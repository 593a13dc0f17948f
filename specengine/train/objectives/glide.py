"""Trains GLIDE: a small LLaMA whose layers also read the target's cached keys and values (sections 3.1 and 3.2).

Row t reads token t and guesses token t + 1. In a cycle the target's cache ends at the root; in training it ends at the
beginning of the row's block.
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
from specengine.train.objectives.base import Objective
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.llama_layer import DecoderLayer, LayerShape, RMSNorm, rotated
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_layers import layer_json, shape_of, spread, start_from
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """Options of `glide`.

    layers: of the drafter; each reads the cache of one of the target's last layers.  block: rows that see the same part
    of that cache.  cross: false removes the attention to that cache.  soft: learn the target's distribution, else the
    token of the text.  own: embedding and head are trained too, else they are the target's.  levels: reported levels.
    warm_start: layers start as some of the target's.
    """

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
    """Attention of a drafter's row over the target's keys and values, with the target's rotary embedding."""

    def __init__(self, shape: LayerShape, target: ModelConfig) -> None:
        super().__init__()
        self.target = target
        width = target.num_heads * target.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    @torch.no_grad()
    def start_from(self, target: TargetWeights, number: int) -> None:
        """Copies the queries of a target's layer, scaled for rows as large as embeddings; the output starts at zero."""
        norm = target.read(f"model.layers.{number}.input_layernorm.weight")
        scale = norm / target.embedding.float().square().mean().sqrt()
        self.q_proj.weight.copy_(target.read(f"model.layers.{number}.self_attn.q_proj.weight") * scale)
        self.o_proj.weight.zero_()

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x: [B, T, hidden].  keys, values: [B, K, T, D].  mask: bool [T, T], true where a row may attend."""
        q = self.q_proj(x).unflatten(-1, (-1, self.target.head_dim)).transpose(1, 2)
        q = rotated(q, *(table.to(x.device) for table in rope_tables(self.target, x.shape[1])))
        mixed = functional.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), mask, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GlideLayer(DecoderLayer):
    """A decoder layer that reads the cache of `target` between attention and MLP; None reads none."""

    def __init__(self, shape: LayerShape, target: ModelConfig | None) -> None:
        super().__init__(shape)
        if target is not None:
            self.cross_attn = CrossAttention(shape, target)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cached: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        """cached: keys, values and mask of CrossAttention; empty without a target."""
        x = x + self.self_attn(self.input_layernorm(x), positions)
        if cached:
            x = x + self.cross_attn(x, *cached)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Model(nn.Module):
    """The part that published tensor names call `model`."""

    embed_tokens: nn.Embedding

    def __init__(self, layers: Iterable[GlideLayer], norm: RMSNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class Glide(nn.Module):
    """GLIDE's network. own: first values of its own embedding [V, hidden] and head [V', hidden]; empty without them."""

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
        """Computes normed states [B, T, hidden] of embedded tokens [B, T, hidden].

        keys, values: [layers, B, K, T, D] of the target.  mask: bool [T, T], true where a row may attend to them.
        """
        x = embedded
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        for m, layer in enumerate(self.model.layers):
            x = layer(x, positions, () if keys is None or values is None else (keys[m], values[m], mask))
        return self.model.norm(x)


def block_mask(rows: int, block: int, device: torch.device | None = None) -> torch.Tensor:
    """Makes the mask bool [rows, rows]: row i may attend to the target's positions of earlier blocks.

    The first block has none before it, so its rows attend to positions up to i.
    """
    position = torch.arange(rows, device=device)
    number = position // block
    return (number[:, None] > number) | ((number[:, None] == 0) & (position <= position[:, None]))


class GlideObjective(Objective):
    """Cross-entropy of the next token, with the target's cache as stale as in a cycle."""

    name = "glide"
    options_type = Options
    network: Glide
    learning_rate = 5e-4

    def __init__(self, target: TargetWeights, options: Options) -> None:
        config = target.config
        self.check(config, options)
        self.target = target
        self.options = options
        own = (target.embedding, target.head) if options.own else ()
        cached = config if options.cross else None
        self.network = Glide(shape_of(config), options.layers, cached, own).to(target.head.device)
        if options.cross:
            self.kv_layers = tuple(range(config.num_layers - options.layers, config.num_layers))
        if options.warm_start:
            with torch.no_grad():
                self.network.model.norm.weight.copy_(target.read("model.norm.weight"))
            for layer, number in zip(self.network.model.layers, spread(options.layers, config), strict=True):
                start_from(layer, target, number)
            for layer, number in zip(self.network.model.layers, self.kv_layers, strict=True) if options.cross else ():
                assert isinstance(layer, GlideLayer)
                layer.cross_attn.start_from(target, number)

    @classmethod
    def check(cls, config: ModelConfig, options: Options) -> None:
        """See Objective."""
        check_range("drafter: layers", options.layers, 1, config.num_layers)

    def rate_of(self, name: str) -> float:
        """Slows the output of cross attention, as the target's values are ten times the drafter's rows."""
        return 0.1 if name.endswith("cross_attn.o_proj.weight") else 1.0

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        own = self.options.own
        mask = block_mask(batch.tokens.shape[1], self.options.block, batch.tokens.device)
        embedded = self.network.model.embed_tokens(batch.tokens) if own else self.target.embed(batch.tokens)
        states = (
            self.network(embedded, batch.keys, batch.values, mask) if self.options.cross else self.network(embedded)
        )
        targets = SoftTargets(batch, self.target, hard=not self.options.soft)
        loss, guesses = targets.compare(0, states, self.network.lm_head.weight if own else self.target.head)
        return loss, targets.report(loss, guesses, self.options.levels)

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; fields with `large_` describe the target whose cache is read."""
        config, options = self.target.config, self.options
        json = layer_json(config, options.layers, "GlideForCausalLM")
        json |= {
            "draft_vocab_size": len(self.target.head),
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
        return json, tensors | self.target.vocabulary_tensors()
