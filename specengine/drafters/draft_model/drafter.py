"""Drafts with a model: any with the target's vocabulary, or the target's own first layers.

Where no rule reads distributions, the host draws children as `match` would draw them. Inside captured cycles they are
then the likeliest tokens, at any temperature.

Its cache keeps the committed tokens, and of chains that the host drafts the accepted ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.draft_model.config import Config
from specengine.drafters.draft_model.network import ModelNetwork
from specengine.drafters.draft_model.reader import ModelReader
from specengine.drafters.draft_model.small_model import SmallModel
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.drawn_trees import DrawnTrees, Sampling
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.models.transformer import Transformer
from specengine.tokenizer import Tokenizer
from specengine.utils.spec_string import check_range


class DraftModel(NetworkDrafter):
    """Drafts a cheaper model's likeliest tokens, or tokens drawn from its distributions.

    costs: of cycles; by default learned from them.
    """

    name = "draft_model"
    config_type = Config
    config: Config
    reader: ModelReader

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        self.small = SmallModel(self.name, config.layers, config.dtype, path, target, hybrids=True)
        self.model, shape = self.small.model, config.shape
        vocabulary = self.model.config.vocab_size
        check_range("tree", max(config.widths), 1, vocabulary)
        self.drafts_in_cycle = not self.small.hybrid  # the host gives its states slots, and reads the text into them
        self.prepare(
            target,
            network=ModelNetwork(self.small),
            reader=ModelReader(self.small, target, shape.levels, config.nodes, max(shape.opened)),
            shape=shape,
            drawn_shape=shape,
            columns=DraftVocabulary(vocabulary, None, None),
            projections=(),  # they are tuned with the model's cache
            nodes=config.nodes,
            replacement=config.replacement,
            costs=costs,
        )

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self.small.check_tokenizer(tokenizer)

    def reads(self, tokens: int, answer: int, batch: int) -> bool:
        return True  # it reads a text where it drafts

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft_whole(requests, partial(self._trees, requests))

    def draw(self, requests: Sequence[DraftRequest], sampling: Sampling | None) -> DrawnTrees:
        drawn = super().draw(requests, sampling)
        if self.drafts_chains and not self.small.hybrid:
            self.reader.keep_chains(requests, drawn.columns[0][:, 1:-1])
        return drawn

    def release(self, request: DraftRequest) -> None:
        self.small.release(request)

    def _trees(self, requests: Sequence[DraftRequest], drafts: bool) -> list[DraftTree]:
        """Drafts all trees, drawn as `match` would draw them."""
        trees = [DraftTree(request.tokens[-1:], [-1]) for request in requests]
        if drafts and (able := self._able(requests)):
            drafted = [requests[i] for i in able]
            limits = self._limits(drafted)
            draws = self.config.noise and any(request.params.temperature for request in drafted)
            sampling = Sampling.of(drafted, self.device, noise=self.config.noise) if draws else None
            drawn = self.draw(drafted, sampling)
            for i, tree in zip(able, drawn.trees(limits)[0], strict=True):
                trees[i] = tree
        return trees
