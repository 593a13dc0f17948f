"""EAGLE-3's network and its training-time test: the drafter learns on its own outputs (section 3.2).

Row t of step 0 reads the target's low, middle and high states of position t and the embedding of token t + 1. Step j
reads step j - 1's output of the same row instead, and the embedding of token t + 1 + j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specengine.models.config import ModelConfig
from specengine.rules.base import check_choice, check_number
from specengine.train.objectives.base import Frozen, LevelReport, Objective, TrainingBatch, ahead, discounted
from specengine.train.objectives.head_loss import as_cast
from specengine.train.objectives.llama_layer import MLP, Attention, LayerShape, RMSNorm
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_layers import layer_json, low_middle_high, shape_of, start_from
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """levels: unrolled steps.  decay: weight of a level against the one above.  fc_norm: a norm for each of the fused
    states (EAGLE-3.1); without, the checkpoint is as EAGLE-3's.  start: what begins as the target's: norm and head
    ("head"), its last layer too ("layer"), or nothing ("random")."""

    levels: int = 7
    decay: float = 0.8
    fc_norm: bool = False
    start: str = "head"

    def __post_init__(self) -> None:
        check_choice("start", self.start, ("head", "layer", "random"))
        check_range("levels", self.levels, 1, 32)
        check_number("decay", self.decay, 0, 1)


class MidLayer(nn.Module):
    """A decoder layer that reads the normed embedding and the normed state side by side."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class Eagle3(nn.Module):
    """vocabulary: V', rows of its own head.  fc_norm: see Options."""

    tap_scale: torch.Tensor

    def __init__(
        self, shape: LayerShape, vocabulary: int, hidden_state_layers: int = 3, *, fc_norm: bool = False
    ) -> None:
        super().__init__()
        size = shape.hidden_size
        self.fc = nn.Linear(hidden_state_layers * size, size, bias=False)
        if fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, shape.rms_norm_eps) for _ in range(hidden_state_layers))
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        # fc sees states divided by this: the residual stream grows by an order of magnitude on its way
        self.register_buffer("tap_scale", torch.ones(hidden_state_layers))

    def fused(self, at_layers: torch.Tensor) -> torch.Tensor:
        """[.., hidden] of the target's states [.., hidden_state_layers, hidden]."""
        if hasattr(self, "fc_norm"):
            at_layers = torch.stack([norm(x) for norm, x in zip(self.fc_norm, at_layers.unbind(-2), strict=True)], -2)
        else:
            at_layers = at_layers / self.tap_scale[:, None]
        return self.fc(at_layers.flatten(-2))

    def forward(
        self, at_layers: torch.Tensor, embedded: torch.Tensor, steps: int, first: int = 0
    ) -> list[torch.Tensor]:
        """Outputs of the steps, each [B, T - first, hidden], of rows from `first` on; those before are only attended.

        at_layers: [B, T, hidden_state_layers, hidden].  embedded: [B, T, hidden] of the next tokens.
        """
        layer, x = self.midlayer, self.fused(at_layers)
        embedded = layer.input_layernorm(embedded)
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = torch.ones(len(positions), len(positions), dtype=torch.bool, device=x.device).triu(1)[first:]
        states, own_keys, own_values = [], [], []
        for step in range(steps):
            if step:
                shifted = functional.pad(embedded[:, first + step :], (0, 0, 0, min(step, len(positions) - first)))
                both = torch.cat([shifted, layer.hidden_norm(x)], -1)
                q, k, v = layer.self_attn.heads(both, positions[first:] + step)
                own_keys.append(k)
                own_values.append(v)
            else:
                both = torch.cat([embedded, layer.hidden_norm(x)], -1)
                q, keys, values = layer.self_attn.heads(both, positions)
                q, x = q[:, :, first:], x[:, first:]
            mixed = mix(q, keys, values, hidden, own_keys, own_values)
            x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            states.append(x)
        return states


def mix(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
) -> torch.Tensor:
    """Attention [B, H, R, D] of queries over the first step's keys and, of each later step, the key of their own row.

    keys, values: [B, K, T, D].  hidden: bool [R, T], what a row may not see of them.  own: [B, K, R, D] each.
    """
    kv_heads, rows = keys.shape[1], q.shape[2]
    grouped = q.unflatten(1, (kv_heads, -1)) * q.shape[-1] ** -0.5  # [B, K, H / K, R, D]
    scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (-1, rows))
    scores = scores.masked_fill(hidden, -torch.inf)
    if not own_keys:
        return (scores.softmax(-1).to(values.dtype).flatten(2, 3) @ values).unflatten(2, (-1, rows)).flatten(1, 2)
    own = (grouped.transpose(2, 3) @ torch.stack(own_keys, -1)).transpose(2, 3)  # [B, K, H / K, R, steps]
    shared, alone = torch.cat([scores, own], -1).softmax(-1).to(values.dtype).split([keys.shape[2], len(own_keys)], -1)
    mixed = (shared.flatten(2, 3) @ values).unflatten(2, (-1, rows))
    return (mixed + (alone.transpose(2, 3) @ torch.stack(own_values, -2)).transpose(2, 3)).flatten(1, 2)


class Eagle3Objective(Objective):
    """Soft cross-entropy of every step, within the drafter's vocabulary; no loss between features."""

    name = "eagle3"
    options_type = Options
    network: Eagle3

    def __init__(self, frozen: Frozen, options: Options) -> None:
        config = frozen.config
        self.frozen, self.options = frozen, options
        self.hidden_state_layers = low_middle_high(config)
        shape = shape_of(config, input_size=2 * config.hidden_size)
        self.network = Eagle3(shape, len(frozen.head), fc_norm=options.fc_norm)
        self.network.to(frozen.head.device)
        if options.start == "layer":
            start_from(self.network.midlayer, frozen, config.num_layers - 1)
        if options.start != "random":
            with torch.no_grad():
                self.network.norm.weight.copy_(frozen.read("model.norm.weight"))
                self.network.lm_head.weight.copy_(frozen.head)

    @classmethod
    def check(cls, config: ModelConfig, options: Options) -> None:
        """See Objective."""
        low_middle_high(config)

    @torch.no_grad()
    def prepare(self, batch: TrainingBatch) -> None:
        """Measures how large the fused states are where there is something to learn; the first tokens' are outliers."""
        assert batch.at_layers is not None  # see hidden_state_layers
        self.network.tap_scale.copy_(batch.at_layers[batch.wanted].float().square().mean((0, 2)).sqrt())

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        network, levels = self.network, self.options.levels
        targets = SoftTargets(batch, self.frozen)
        embedded = self.frozen.embed(ahead(batch.tokens, 1))
        first = targets.first_row(levels)
        states = network(batch.at_layers, embedded, levels, first)
        head = as_cast(network.lm_head.weight)
        compared = [targets.compare(i, network.norm(state), head, first) for i, state in enumerate(states, start=1)]
        losses, guesses = zip(*compared, strict=True)
        return discounted(losses, self.options.decay), LevelReport.of(losses, guesses, batch)

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; the official layout. Layer numbers are left out: engines count them differently, and all take
        these where none are given."""
        tensors = {k: x.detach() for k, x in self.network.state_dict().items() if k != "tap_scale"}
        config = self.frozen.config
        tensors["fc.weight"] = tensors["fc.weight"] / self._column_scale
        tensors |= self.frozen.vocabulary_tensors()
        if self.frozen.vocabulary is not None:
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
            tensors["t2d"][self.frozen.vocabulary.cpu()] = True
        json = layer_json(config, 1, "LlamaForCausalLMEagle3") | {"draft_vocab_size": len(self.frozen.head)}
        return json | ({"fc_norm": True} if self.options.fc_norm else {}), tensors

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Objective."""
        return super().adopted(tensors | {"fc.weight": tensors["fc.weight"] * self._column_scale.cpu()})

    @property
    def _column_scale(self) -> torch.Tensor:
        """[hidden_state_layers * hidden], what the columns of fc as they are trained are too large by."""
        scale = torch.ones_like(self.network.tap_scale) if self.options.fc_norm else self.network.tap_scale
        return scale.repeat_interleave(self.frozen.config.hidden_size)
