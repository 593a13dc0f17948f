"""A draft model: a LLaMA of a few of the target's own layers, taught to say what the target says (distillation).

Row t reads token t and guesses token t + 1. Embedding and head are the target's: they would be most of its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from specengine.models.config import ModelConfig
from specengine.train.objectives.base import Frozen, LevelReport, Objective, TrainingBatch
from specengine.train.objectives.glide import Glide
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_layers import layer_json, shape_of, spread, start_from
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """layers: evenly chosen from the target's, first and last among them.  soft: learn the target's distribution, else
    the token that was written.  whole: the checkpoint has embedding and head too, so that any engine loads it.
    levels: reported."""

    layers: int = 3
    soft: bool = True
    whole: bool = False
    levels: int = 4

    def __post_init__(self) -> None:
        check_range("layers", self.layers, 1, 1000)
        check_range("levels", self.levels, 1, 32)


class DraftModelObjective(Objective):
    """Cross-entropy against the target's distribution of the next token."""

    name = "draft-model"
    options_type = Options
    network: Glide
    learning_rate = 3e-4

    def __init__(self, frozen: Frozen, options: Options) -> None:
        config = frozen.config
        self.check(config, options)
        if frozen.vocabulary is not None:  # rules may ask for its whole distribution, so it says all tokens
            head = frozen.embedding if config.tie_embeddings else frozen.read("lm_head.weight")
            frozen = replace(frozen, head=head, vocabulary=None)
        self.frozen, self.options = frozen, options
        self.network = Glide(shape_of(config), options.layers, None).to(frozen.head.device)
        with torch.no_grad():
            self.network.model.norm.weight.copy_(frozen.read("model.norm.weight"))
        for layer, number in zip(self.network.model.layers, spread(options.layers, config), strict=True):
            start_from(layer, frozen, number)

    @classmethod
    def check(cls, config: ModelConfig, options: Options) -> None:
        """See Objective."""
        check_range("drafter: layers", options.layers, 1, config.num_layers)

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        states = self.network(self.frozen.embed(batch.tokens))
        targets = SoftTargets(batch, self.frozen, hard=not self.options.soft)
        loss, guesses = targets.compare(0, states, self.frozen.head)
        return loss, targets.report(loss, guesses, self.options.levels)

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; the layout of a LLaMA, or all of it but what `shared_with_target` lists."""
        shared = {"model.embed_tokens.weight": self.frozen.embedding, "lm_head.weight": self.frozen.head}
        tensors = {name: x.detach() for name, x in self.network.state_dict().items()}
        json = layer_json(self.frozen.config, self.options.layers, "LlamaForCausalLM")
        if self.options.whole:
            if self.frozen.config.tie_embeddings:
                del shared["lm_head.weight"]
            return json | {"tie_word_embeddings": self.frozen.config.tie_embeddings}, tensors | shared
        return json | {"shared_with_target": list(shared)}, tensors
