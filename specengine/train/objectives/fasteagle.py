"""Trains FastEagle: N layers, each of which guesses one token further from the same row (sections 3 and 4).

Row t reads the target's hidden states of position t and the embedding of token t + 1. The output of layer i predicts
the target's last hidden state of position t + i, from which the target's own head guesses token t + i + 1.

That is the paper's, and the default. Options add parts of other drafters: EAGLE-3's first layer and head, and DSpark's
Markov head, by which a level below the first knows the token above.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from specengine.models.config import ModelConfig
from specengine.rules.base import check_choice, check_number
from specengine.train.objectives.base import Objective
from specengine.train.objectives.fasteagle_network import FastEagleNetwork
from specengine.train.objectives.head_loss import as_cast, soft_cross_entropy
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.llama_layer import RMSNorm
from specengine.train.objectives.target_layers import layer_json, low_middle_high, shape_of, start_from
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch, ahead
from specengine.utils.spec_string import check_range

STARTS = ("first", "last", "entry", "random")


@dataclass(frozen=True)
class FastEagleOptions:
    """Options of `fasteagle`.

    levels: N.  cross_entropy, feature: weights of soft cross-entropy and of SmoothL1 between hidden states.
    feature_sum: SmoothL1 is summed over dimensions, else averaged.  decay: the deepest layer has weight 1, each other
    layer `decay` times the weight of the next deeper one.
    parallel: all layers read the same input instead of each other's output (the paper's ablation).
    norm: a trained norm between the layers' outputs and the head.
    start: layers start as the target's first or last ones, or at random; `entry`: the deeper ones as the first layer,
    without the columns of the embedding.
    entry: the first layer reads fused hidden states and embedding as a sum, or side by side as EAGLE-3's (`concat`).
    head: the target's, or an `own` trained one that starts as the target's.
    markov: rank of what a level's logits gain by the token above; 0: nothing.
    """

    levels: int = 4
    cross_entropy: float = 0.1
    feature: float = 1.0
    decay: float = 0.9
    feature_sum: bool = False
    parallel: bool = False
    norm: bool = True
    start: str = "first"
    entry: str = "fused"
    head: str = "target"
    markov: int = 0

    def __post_init__(self) -> None:
        check_range("levels", self.levels, 1, 16)
        for name in ("cross_entropy", "feature", "decay"):
            check_number(name, getattr(self, name), 0, 1000)
        check_range("markov", self.markov, 0, 4096)
        check_choice("start", self.start, STARTS)
        check_choice("entry", self.entry, ("fused", "concat"))
        check_choice("head", self.head, ("target", "own"))
        if self.parallel and self.entry == "concat":
            raise ValueError("parallel: expected false with entry=concat")
        if self.start == "entry" and self.entry != "concat":
            raise ValueError("start: expected first, last or random with entry=fused, got 'entry'")


class FastEagleObjective(Objective):
    """The multi-level loss: per level soft cross-entropy, and SmoothL1 to the target's hidden state."""

    name = "fasteagle"
    options_type = FastEagleOptions
    network: FastEagleNetwork

    def __init__(self, target: TargetWeights, options: FastEagleOptions) -> None:
        c = target.config
        self.target = target
        self.options = options
        self.hidden_state_layers = low_middle_high(c)
        concat = options.entry == "concat"
        self.network = FastEagleNetwork(
            shape_of(c),
            options.levels,
            len(self.hidden_state_layers),
            parallel=options.parallel,
            norm=options.norm,
            concat=shape_of(c, input_size=2 * c.hidden_size) if concat else None,
            head=len(target.head) if options.head == "own" else 0,
            markov=(len(target.head), options.markov),
        )
        # Embeddings are far smaller than hidden states; export() multiplies the factor into fc_input.
        self._scale = 1.0 if concat else 1 / target.embedding.square().mean().sqrt().item()
        self._start()
        self.network.to(target.embedding.device)

    @classmethod
    def check(cls, config: ModelConfig, options: FastEagleOptions) -> None:
        """See Objective."""
        low_middle_high(config)

    @torch.no_grad()
    def prepare(self, batch: TrainingBatch) -> None:
        """Measures the scale of the fused hidden states at learned positions, as the first tokens have outliers."""
        if self.options.entry == "concat":
            assert batch.at_layers is not None  # see hidden_state_layers
            self.network.tap_scale.copy_(batch.at_layers[batch.wanted].float().square().mean((0, 2)).sqrt())

    @torch.no_grad()
    def _start(self) -> None:
        """Copies the target's layers, norm and head as far as the options say."""
        c, options, network = self.target.config, self.options, self.network
        if network.lm_head is not None:
            network.lm_head.weight.copy_(self.target.head)
        if (
            network.markov_w1 is not None and network.markov_w2 is not None
        ):  # the product is zero, but only one factor may be
            network.markov_w1.weight.normal_()
            network.markov_w2.weight.zero_()
        if options.start == "random":
            return
        first = max(0, c.num_layers - options.levels) if options.start == "last" else 0
        for i, layer in enumerate(network.layers):
            start_from(layer, self.target, min(first + i, c.num_layers - 1))
        if options.start == "entry":
            self._copy_entry(network.state_dict())
        if isinstance(network.norm, RMSNorm):
            network.norm.weight.copy_(self.target.read("model.norm.weight"))
        if first == 0 and options.entry == "fused":  # the lowest layers also read the embedding of the next token
            network.fc_input.weight[:, : c.hidden_size] *= 1 / self._scale
            network.fc_input.weight[:, c.hidden_size :] = torch.eye(c.hidden_size) / self._scale

    def _copy_entry(self, state: dict[str, torch.Tensor]) -> None:
        """Makes the deeper layers of a state equal to the first one; its last columns read the hidden state."""
        for level in range(1, self.options.levels):
            for name in self.network.layers[level].state_dict():
                entry = state["layers.0." + name.replace("input_layernorm", "hidden_norm")]
                own = state[f"layers.{level}.{name}"]
                own.copy_(entry[..., -own.shape[-1] :])

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        options = self.options
        width = batch.tokens.shape[1]
        embedded = self.target.embed(ahead(batch.tokens, 1)) * self._scale
        states = self.network(batch.at_layers, embedded)
        learned = batch.wanted.flatten().nonzero()[:, 0]  # rows whose hidden states are predicted
        theirs = batch.last.flatten(0, 1)[learned]
        with torch.no_grad():
            target_probs = self.target.logits(theirs).float().softmax(-1)
        network = self.network
        head = as_cast(self.target.head if network.lm_head is None else network.lm_head.weight)
        bigram = None if network.markov_w2 is None else torch.cat([head, as_cast(network.markov_w2.weight)], 1)
        known = self.target.draft_ids(batch.greedy.flatten()[learned]) >= 0
        best = 1 if torch.is_grad_enabled() else LevelReport.NEAR
        total = theirs.new_zeros(())
        losses, ranked = [], []
        above = batch.tokens.flatten()  # of every row, the token that its next level follows
        for i, state in enumerate(states, start=1):
            counted = learned % width >= i
            rows = torch.where(counted, learned - i, 0)
            ours = state.flatten(0, 1)[rows]
            read, matrix = ours, head
            if bigram is not None and i > 1:
                token = batch.tokens.flatten()[learned] if torch.is_grad_enabled() else above[rows]
                read, matrix = torch.cat([as_cast(ours), as_cast(self._above(token))], 1), bigram
            entropy, guesses = soft_cross_entropy(read, matrix, target_probs, counted & known, best)
            level = options.cross_entropy * entropy
            if options.feature:
                distance = functional.smooth_l1_loss(ours.float(), theirs, reduction="none")
                distance = distance.sum(-1) if options.feature_sum else distance.mean(-1)
                level = level + options.feature * (distance * counted).sum()
            total = total + options.decay ** (options.levels - i) * level
            losses.append(level)
            own = batch.tokens.new_full((batch.tokens.numel(), best), -1)
            own[rows[counted]] = self.target.target_ids(guesses[counted])
            above = own[:, 0]
            ranked.append(own.unflatten(0, batch.tokens.shape))
        return total, LevelReport.of(losses, ranked, batch)

    def _above(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the rows [R, rank] of markov_w1 of the target's tokens; zeros of tokens outside the vocabulary."""
        ids = self.target.draft_ids(tokens)
        assert self.network.markov_w1 is not None
        return self.network.markov_w1(ids.clamp(min=0)) * (ids >= 0)[:, None]

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective."""
        c = self.target.config
        state = self.network.state_dict()
        tensors = {name: tensor.detach().clone() for name, tensor in state.items() if name != "tap_scale"}
        self._scale_columns(tensors, 1)
        config = {
            **layer_json(c, self.options.levels, "FastEagleDraftModel"),
            "draft_vocab_size": len(self.target.head),
            "target_hidden_size": c.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.hidden_state_layers),
            "parallel": self.options.parallel,
            **({"entry": "concat"} if self.options.entry == "concat" else {}),
        }
        return config, tensors | self.target.vocabulary_tensors()

    def vocabulary_rows(self) -> list[str]:
        """See Objective."""
        return [name for name in self.network.state_dict() if name.startswith(("lm_head.", "markov_"))]

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Objective."""
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._scale_columns(tensors, -1)
        state = super().adopted(tensors)
        if self.options.start == "entry" and "layers.1.mlp.up_proj.weight" not in tensors:
            state = {name: tensor.clone() for name, tensor in state.items()}
            self._copy_entry(state)
        return state

    def translated(self, json: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
        """See Objective: EAGLE-3 gives the first level, and an earlier FastEagle may lack the parts of the options."""
        own = dict.fromkeys(self.export()[1])
        if "fc.weight" in names and self.options.entry == "concat":
            theirs = {name: _eagle3_name(name) for name in own}
            return {name: there for name, there in theirs.items() if there in names}
        added = ("lm_head.", "markov_")
        return {name: name for name in own if name in names or not name.startswith(added)}

    def _scale_columns(self, tensors: dict[str, torch.Tensor], power: int) -> None:
        """Brings the columns that read inputs from the scale of training to that of a checkpoint, or back (-1)."""
        size = self.target.config.hidden_size
        if self.options.entry == "concat":
            scale = self.network.tap_scale.repeat_interleave(size).to(tensors["fc_features.weight"].device)
            tensors["fc_features.weight"] /= scale**power
        else:
            tensors["fc_input.weight"][:, size:] *= self._scale**power


def _eagle3_name(name: str) -> str:
    return name.replace("fc_features.", "fc.").replace("layers.0.", "midlayer.")
