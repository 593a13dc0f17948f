"""Trains a draft model by distillation: a LLaMA that starts from a few of the target's own layers.

Row t reads token t and guesses token t + 1. Embedding and head are the target's: own ones would be most of its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from specengine.models.config import ModelConfig
from specengine.train.objectives.base import Objective
from specengine.train.objectives.glide import Glide
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.soft_targets import SoftTargets
from specengine.train.objectives.target_layers import layer_json, shape_of, spread, start_from
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Options:
    """Options of `draft-model`.

    layers: number of the target's layers to start from, evenly spread, with the first and the last.
    soft: learn the target's distribution, else the token of the text.  whole: the checkpoint also has embedding and
    head, so that any engine loads it.  levels: reported levels.
    """

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

    def __init__(self, target: TargetWeights, options: Options) -> None:
        config = target.config
        self.check(config, options)
        if target.vocabulary is not None:  # rules may read its whole distribution, so its vocabulary is the target's
            head = target.embedding if config.tie_embeddings else target.read("lm_head.weight")
            target = replace(target, head=head, vocabulary=None)
        self.target = target
        self.options = options
        self.network = Glide(shape_of(config), options.layers, None).to(target.head.device)
        with torch.no_grad():
            self.network.model.norm.weight.copy_(target.read("model.norm.weight"))
        for layer, number in zip(self.network.model.layers, spread(options.layers, config), strict=True):
            start_from(layer, target, number)

    @classmethod
    def check(cls, config: ModelConfig, options: Options) -> None:
        """See Objective."""
        check_range("drafter: layers", options.layers, 1, config.num_layers)

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective."""
        states = self.network(self.target.embed(batch.tokens))
        targets = SoftTargets(batch, self.target, hard=not self.options.soft)
        loss, guesses = targets.compare(0, states, self.target.head)
        return loss, targets.report(loss, guesses, self.options.levels)

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; the layout of a LLaMA, without the tensors that `shared_with_target` lists."""
        shared = {"model.embed_tokens.weight": self.target.embedding, "lm_head.weight": self.target.head}
        tensors = {name: x.detach() for name, x in self.network.state_dict().items()}
        json = layer_json(self.target.config, self.options.layers, "LlamaForCausalLM")
        if self.options.whole:
            if self.target.config.tie_embeddings:
                del shared["lm_head.weight"]
            return json | {"tie_word_embeddings": self.target.config.tie_embeddings}, tensors | shared
        return json | {"shared_with_target": list(shared)}, tensors
