"""Trains block drafters, which guess all tokens of a block in one pass; block_families.py has them.

A block begins at row t (see Objective): slot 0 holds token t + 1, the others the mask token. Blocks of random rows are
learned, each in its own context (DFlash, arXiv 2602.06036, section 4.2).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specengine.models.config import ModelConfig
from specengine.rules.base import check_choice, check_number
from specengine.train.objectives.base import Objective, discounted
from specengine.train.objectives.block_loss import Guesses, LossShares, block_loss
from specengine.train.objectives.block_network import BlockNetwork
from specengine.train.objectives.head_loss import as_cast
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.target_layers import layer_json, low_middle_high, shape_of
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch, ahead
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class BlockOptions:
    """Options of all block drafters.

    block: slots of a block.  layers: of the drafter.  anchors: random rows of a dialogue that begin a block in a step;
    0: all rows.  text, soft, distance: weights of the losses, see LossShares.
    decay: slots by which the weight of a guess falls by e; 0: all guesses weigh the same.
    start: the final norm starts as the target's (`norm`), or as ones (`random`).
    """

    block: int = 8
    layers: int = 1
    anchors: int = 64
    text: float = 1.0
    soft: float = 0.0
    distance: float = 0.0
    decay: float = 4.0
    start: str = "norm"

    def __post_init__(self) -> None:
        check_range("block", self.block, 2, 32)
        check_range("layers", self.layers, 1, 16)
        check_range("anchors", self.anchors, 0, 1 << 16)
        for name in ("text", "soft", "distance", "decay"):
            check_number(name, getattr(self, name), 0, 1000)
        check_choice("start", self.start, ("norm", "random"))


class BlockObjective(Objective):
    """The losses of a block drafter. A subclass says how its slots are read and what its file says.

    causal: slots see only slots before them.  anchor_guesses: slot 0 guesses, too.
    """

    learning_rate = 6e-4
    causal: ClassVar[bool] = False
    anchor_guesses: ClassVar[bool] = False
    network: BlockNetwork

    def __init__(self, target: TargetWeights, options: BlockOptions) -> None:
        c = target.config
        self.target = target
        self.options = options
        self.hidden_state_layers = low_middle_high(c)
        markov, self._confidence = self.heads()
        self.network = BlockNetwork(
            shape_of(c),
            options.layers,
            len(self.hidden_state_layers),
            causal=self.causal,
            markov=(c.vocab_size, markov, len(target.head)) if markov else None,
            confidence=self._confidence > 0,
        )
        if options.start == "norm":
            with torch.no_grad():
                self.network.norm.weight.copy_(target.read("model.norm.weight"))
        self.network.to(target.embedding.device)

    @classmethod
    def check(cls, config: ModelConfig, options: BlockOptions) -> None:
        """See Objective."""
        low_middle_high(config)

    def heads(self) -> tuple[int, float]:
        """Returns the rank of the Markov head and the weight of the confidence loss; 0: there is no such head."""
        return 0, 0.0

    @property
    def levels(self) -> int:
        """The guesses of a block."""
        return self.options.block - (not self.anchor_guesses)

    @property
    def mask_token(self) -> int:
        """The token of the slots without a token. Any will do: a slot's place says that it is empty, not its token."""
        return self.target.config.vocab_size - 1

    @torch.no_grad()
    def prepare(self, batch: TrainingBatch) -> None:
        """Measures the scale of the fused hidden states at learned positions, as the first tokens have outliers."""
        assert batch.at_layers is not None  # see hidden_state_layers
        self.network.tap_scale.copy_(batch.at_layers[batch.wanted].float().square().mean((0, 2)).sqrt())

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, LevelReport]:
        """See Objective. The loss of random blocks is scaled to that of all blocks."""
        begins = ahead(batch.wanted, 1)  # rows whose first guess is learned
        chosen = self._chosen(begins)
        best = 1 if torch.is_grad_enabled() else LevelReport.NEAR
        ranked = [batch.tokens.new_full((*batch.tokens.shape, best), -1) for _ in range(self.levels)]
        sums = batch.last.new_zeros(self.levels)
        for number in chosen.any(1).nonzero()[:, 0].tolist():
            sums = sums + self._of_dialogue(batch, number, chosen[number].nonzero()[:, 0], ranked)
        scale = begins.sum() / chosen.sum().clamp(min=1)
        decay = math.exp(-1 / self.options.decay) if self.options.decay else 1.0
        return discounted(list(sums), decay) * scale, LevelReport.of(list(sums), ranked, batch, chosen)

    def _chosen(self, begins: torch.Tensor) -> torch.Tensor:
        """Chooses the rows [B, T] that begin a block; evaluation takes all."""
        count = self.options.anchors
        if not count or not torch.is_grad_enabled() or count >= begins.shape[1]:
            return begins
        drawn = torch.rand(begins.shape).to(begins.device).masked_fill(~begins, -1.0)
        return (drawn >= drawn.topk(count).values[:, -1:]) & begins

    def _of_dialogue(
        self, batch: TrainingBatch, number: int, rows: torch.Tensor, ranked: list[torch.Tensor]
    ) -> torch.Tensor:
        """Returns the losses [levels] of the blocks at some rows of a dialogue, and writes the best guesses."""
        assert batch.at_layers is not None
        length, options, network = int(batch.lengths[number]), self.options, self.network
        tokens = batch.tokens[number]
        slots = tokens.new_full((len(rows), options.block), self.mask_token)
        slots[:, 0] = tokens[rows + 1]
        states = network(batch.at_layers[number, :length], self.target.embed(slots), rows)
        states = states if self.anchor_guesses else states[:, 1:]
        level = torch.arange(self.levels, device=rows.device)
        place = rows[:, None] + 1 + level  # of the token before a guess
        learned = batch.wanted[number][place.clamp(max=length - 1)] & (place < length)
        block, depth = learned.cumprod(1).nonzero(as_tuple=True)  # a block ends before a token that is not learned
        before = place[block, depth]
        ours, matrix = as_cast(states[block, depth]), as_cast(self.target.head)
        confidence = None
        if network.markov_head is not None:
            above = as_cast(network.markov_head.markov_w1(tokens[before]))
            ours = torch.cat([ours, above], 1)
            matrix = torch.cat([matrix, as_cast(network.markov_head.markov_w2.weight)], 1)
            if network.confidence_head is not None:
                confidence = network.confidence_head.proj(ours)[:, 0]
        guesses = Guesses(ours, batch.last[number][before], self.target.draft_ids(tokens[before + 1]), confidence)
        shares = LossShares(options.text, options.soft, options.distance, self._confidence)
        losses, best = block_loss(guesses, matrix, self.target.logits, shares, ranked[0].shape[-1])
        for i, guessed in enumerate(ranked):
            here = depth == i
            guessed[number, rows[block[here]], : best.shape[1]] = self.target.target_ids(best[here])
        return losses.new_zeros(self.levels).index_add(0, depth, losses)

    def vocabulary_rows(self) -> list[str]:
        """See Objective."""
        return ["markov_head.markov_w2.weight"] if self.network.markov_head is not None else []

    def export(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """See Objective; z-lab's and DeepSpec's layouts. A head of fewer tokens lies beside them, with `d2t`."""
        tensors = {name: x.detach().clone() for name, x in self.network.state_dict().items() if name != "tap_scale"}
        tensors["fc.weight"] /= self._column_scale
        if self.target.vocabulary is not None:
            tensors |= {"lm_head.weight": self.target.head, **self.target.vocabulary_tensors()}
        json = layer_json(self.target.config, self.options.layers, "DFlashDraftModel") | self.json()
        return json | {"num_target_layers": self.target.config.num_layers}, tensors

    @abstractmethod
    def json(self) -> dict[str, Any]:
        """Returns the family's own entries of config.json."""

    @property
    def file_layers(self) -> list[int]:
        """The target's layers whose outputs are read: the layers before those whose inputs are."""
        return [layer - 1 for layer in self.hidden_state_layers]

    def adopted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Objective."""
        return super().adopted(tensors | {"fc.weight": tensors["fc.weight"] * self._column_scale.cpu()})

    @property
    def _column_scale(self) -> torch.Tensor:
        """The factor [layers * hidden] by which the columns of fc are larger in training than in the file."""
        return self.network.tap_scale.repeat_interleave(self.target.config.hidden_size)
