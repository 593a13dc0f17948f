"""A drafter with nothing but its logits: what follows a token stands in a table."""

import torch

from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftTree
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.level_logits import LevelDistributions
from specengine.drafters.drafter import Drafter
from specengine.rules import Wants


class Table(Drafter, LevelDistributions):
    """Drafts trees of a shape. logits: float32 [V, Vd].  known: the target's token of each column; None: all."""

    name = "table"
    offers = frozenset(Wants)
    logits_device = torch.device("cpu")

    def __init__(
        self, logits: torch.Tensor, shape: TreeShape, known: list[int] | None = None, replacement: bool = False
    ) -> None:
        vocab, count = logits.shape
        tokens = None if known is None else torch.tensor(known, dtype=torch.int32)
        self.logits, self.shape, self.replacement = logits, shape, replacement
        self.columns = Columns.of(tokens, count, vocab, self.logits_device)

    @property
    def max_nodes(self) -> int:
        return len(self.shape.parents)

    def draft(self, requests):
        return Draft(requests, [DraftTree(request.tokens[-1:], [-1]) for request in requests])

    def levels_for(self, request) -> int:
        return request.draft_limit

    def begin_levels(self, trees):
        return lambda growing, level: self.logits[[tree.tokens[node] for tree in growing for node in tree.open]]
