"""Trains EAGLE-3 with its training-time test: the drafter learns on its own outputs (section 3.2).

Row t of step 0 reads the target's low, middle and high hidden states of position t and the embedding of token t + 1.
Step j reads the output of step j - 1 in the same row instead, and the embedding of token t + 1 + j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specengine.models.config import ModelConfig
from specengine.rules.base import check_choice, check_number
from specengine.train.objectives.base import Objective, discounted
from specengine.train.objectives.head_loss import as_cast
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.llama_layer import MLP, Attention, LayerShape, RMSNorm
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_layers import layer_json, low_middle_high, shape_of, start_from
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch, ahead
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """Options of `eagle3`.

    levels: unrolled steps.  decay: weight of a level relative to the level above.  fc_norm: a norm for each fused
    hidden state (EAGLE-3.1); without it the checkpoint has EAGLE-3's layout.
    start: the parts that start as the target's: norm and head (`head`), its last layer too (`layer`), none (`random`).
    """

    levels: int = 7
    decay: float = 0.8
    fc_norm: bool = False
    start: str = "head"

    def __post_init__(self) -> None:
        check_choice("start", self.start, ("head", "layer", "random"))
        check_range("levels", self.levels, 1, 32)
        check_number("decay", self.decay, 0, 1)


class MidLayer(nn.Module):
    """A decoder layer that reads the normed embedding and the normed hidden state side by side."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class Eagle3(nn.Module):
    """EAGLE-3's network. vocabulary: V', rows of its own head.  layers: fused hidden states.  fc_norm: see Options."""

    tap_scale: torch.Tensor  # of each fused hidden state; checkpoints of runs have this name

    def __init__(self, shape: LayerShape, vocabulary: int, layers: int = 3, *, fc_norm: bool = False) -> None:
        super().__init__()
        size = shape.hidden_size
        self.fc = nn.Linear(layers * size, size, bias=False)
        if fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, shape.rms_norm_eps) for _ in range(layers))
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        # fc reads hidden states divided by this: the residual stream grows by an order of magnitude through the target
        self.register_buffer("tap_scale", torch.ones(layers))

    def fused(self, at_layers: torch.Tensor) -> torch.Tensor:
        """Fuses the target's hidden states [.., layers, hidden] to [.., hidden]."""
        if hasattr(self, "fc_norm"):
            at_layers = torch.stack([norm(x) for norm, x in zip(self.fc_norm, at_layers.unbind(-2), strict=True)], -2)
        else:
            at_layers = at_layers / self.tap_scale[:, None]
        return self.fc(at_layers.flatten(-2))

    def forward(
        self, at_layers: torch.Tensor, embedded: torch.Tensor, steps: int, first: int = 0
    ) -> list[torch.Tensor]:
        """Computes the outputs of all steps, each [B, T - first, hidden], for rows from `first` on.

        Earlier rows are only attended to. at_layers: [B, T, layers, hidden].  embedded: [B, T, hidden], the embeddings
        of the next tokens.
        """
        layer = self.midlayer
        x = self.fused(at_layers)
        embedded = layer.input_layernorm(embedded)
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = torch.ones(len(positions), len(positions), dtype=torch.bool, device=x.device).triu(1)[first:]
        states = []
        own_keys, own_values = [], []
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
                q = q[:, :, first:]
                x = x[:, first:]
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
    """Attends [B, H, R, D] over the first step's keys and, for each later step, the key of the query's own row.

    keys, values: [B, K, T, D].  hidden: bool [R, T], the keys that a row may not see.  own_keys, own_values:
    [B, K, R, D] per later step.
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
    """Soft cross-entropy of every step, within the drafter's vocabulary; no loss between hidden states."""

    name = "eagle3"
    options_type = Options
    network: Eagle3

    def __init__(self, target: TargetWeights, options: Options) -> None:
        config = target.config
        self.target = target
        self.options = options
        self.hidden_state_layers = low_middle_high(config)
        shape = shape_of(config, input_size=2 * config.hidden_size)
        self.network = Eagle3(shape, len(target.head), fc_norm=options.fc_norm)
        self.network.to(target.head.device)
        if options.start == "layer":
            start_from(self.network.midlayer, target, config.num_layers - 1)
        if options.start != "random":
            with torch.no_grad():
                self.network.norm.weight.copy_(target.read("model.norm.weight"))
                self.network.lm_head.weight.copy_(target.head)

    @classmethod
    def check(cls, config: ModelConfig, options: Options) -> None:
        """See Objective."""
        low_middle_high(config)

    @torch.no_grad()
    def prepare(self, batch: TrainingBatch) -> None:
        """Measures the scale of the fused hidden states at learned positions, as the first tokens have outliers."""
        assert batch.at_layers is not None  # see hidden_state_layers
        self.network.tap_scale.copy_(batch.at_layers[batch.wanted].float().square().mean((0, 2)).sqrt())

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        network = self.network
        levels = self.options.levels
        targets = SoftTargets(batch, self.target)
        embedded = self.target.embed(ahead(batch.tokens, 1))
        first = targets.first_row(levels)
        states = network(batch.at_layers, embedded, levels, first)
        head = as_cast(network.lm_head.weight)
        compared = [targets.compare(i, network.norm(state), head, first) for i, state in enumerate(states, start=1)]
        losses, guesses = zip(*compared, strict=True)
        return discounted(losses, self.options.decay), LevelReport.of(losses, guesses, batch)

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; the official layout, without layer numbers.

        Engines count layers differently, and all of them read these layers where a checkpoint names none.
        """
        tensors = {k: x.detach() for k, x in self.network.state_dict().items() if k != "tap_scale"}
        config = self.target.config
        tensors["fc.weight"] = tensors["fc.weight"] / self._column_scale
        tensors |= self.target.vocabulary_tensors()
        if self.target.vocabulary is not None:
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
            tensors["t2d"][self.target.vocabulary.cpu()] = True
        json = layer_json(config, 1, "LlamaForCausalLMEagle3") | {"draft_vocab_size": len(self.target.head)}
        return json | ({"fc_norm": True} if self.options.fc_norm else {}), tensors

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Objective."""
        return super().adopted(tensors | {"fc.weight": tensors["fc.weight"] * self._column_scale.cpu()})

    @property
    def _column_scale(self) -> torch.Tensor:
        """The factor [layers * hidden] by which the columns of fc are larger in training than in the checkpoint."""
        scale = torch.ones_like(self.network.tap_scale) if self.options.fc_norm else self.network.tap_scale
        return scale.repeat_interleave(self.target.config.hidden_size)
