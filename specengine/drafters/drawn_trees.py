"""Trees whose distributions a rule reads: children are drawn from them, or are the likeliest.

The shape is fixed beforehand. Nothing about a node's children but their distribution is known when their number is
fixed, so no rule is biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.engine_views import DraftRequest
from specengine.ops.draw_siblings import draw_siblings
from specengine.ops.growth.growing_trees import Children, GrowingTrees, GrownRows, Logits
from specengine.ops.growth.growth_plan import GrowthPlan
from specengine.ops.row_tools import confidence as highest_probabilities
from specengine.ops.row_tools import likeliest, stack_rows
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.select_nodes import SelectedTrees, select_nodes
from specengine.utils.host_memory import is_host


@dataclass(frozen=True)
class Sampling:
    """How children are drawn: the sampling parameters and the text of the requests, as the target's rows have them.

    noise: 0: noise of its own; otherwise that of the rule `match`, at `noise` times the temperature. Requests of
    temperature 0 then get the likeliest children.  replacement: whether siblings are drawn with replacement.
    """

    params: SamplingTable
    history: TokenHistory
    noise: float = 0.0
    replacement: bool = False

    @staticmethod
    def of(
        requests: Sequence[DraftRequest], device: torch.device, noise: float = 0.0, replacement: bool = False
    ) -> Sampling:
        """Returns that of requests on the host."""
        params = SamplingTable.of([s.params for s in requests], [s.seed for s in requests]).to(device)
        if noise:
            params = replace(params, temperature=noise * params.temperature)
        longest = max((len(s.tokens) for s in requests), default=1)
        history = TokenHistory.of([s.tokens for s in requests], [s.prompt_length for s in requests], longest)
        return Sampling(params, history.to(device), noise, replacement)


class DrawnTrees(GrowingTrees):
    """Grows trees and keeps the logits that the children of each level come from.

    sampling: None: the children are the likeliest.
    """

    def __init__(
        self,
        plan: GrowthPlan,
        roots: torch.Tensor | TokenHistory,
        known: torch.Tensor,
        columns: DraftVocabulary,
        sampling: Sampling | None,
        origin: torch.Tensor | None = None,
    ) -> None:
        super().__init__(plan, roots, known, columns.tokens, origin=origin)
        self._vocabulary, self._sampling = columns, sampling
        self._logits: list[torch.Tensor] = []

    def _grows_whole(self, found: Logits) -> bool:
        return False  # the logits of every level are kept

    def add(self, found: Logits | Children) -> GrownRows | None:
        if isinstance(found, Logits):
            return super().add(found)
        logits = found.scores.new_full((len(found.tokens), self._vocabulary.count), -torch.inf)
        return super().add(Logits(logits.scatter(1, found.tokens.long(), found.scores)))

    def _expand(self, found: Logits) -> GrownRows | None:
        level, batch = self.plan.levels[self.level], len(self._roots)
        values = found.values
        if len(values) < batch * level.rows:
            values = values.repeat_interleave(level.rows, 0)
        if found.delta is not None:
            values = values + found.delta
        self._logits.append(values)
        if self._sampling is None:
            return super()._expand(found)
        drawn = self._draw(values, self._sampling, level.children)
        if (widths := self._widths(values, found.confidence)) is not None:
            drawn = torch.where(torch.arange(level.children, device=drawn.device) < widths[:, None], drawn, -1)
        return self._add_children(drawn, self.plan.equal_scores[self.level], token_ids=None)

    def _draw(self, logits: torch.Tensor, sampling: Sampling, count: int) -> torch.Tensor:
        """Returns the target's tokens int32 [B * w, count]; -1 where a distribution has no further token."""
        nodes, owners = self.before.beam.flatten(), self.plan.owners[self.level]
        own = (logits, nodes, self._tree(), owners, sampling.params, sampling.history)
        index, as_match = self._vocabulary.index, sampling.noise > 0
        drawn = draw_siblings(*own, count, sampling.replacement, index=index, as_match=as_match)
        if as_match:
            cold = (sampling.params.temperature[owners.long()] == 0).nonzero().flatten()
            best = torch.tensor(likeliest(logits[cold], count), dtype=torch.int32).view(-1, count)
            best, tokens = best.to(drawn.device), self._vocabulary.tokens
            drawn[cold] = best if tokens is None else tokens[best.long()]
        return drawn

    def _tree(self) -> TreeBatch:
        """Returns the trees as far as they have grown."""
        if self.level == 0:  # no column is written yet
            return TreeBatch(self._roots.flatten(), *self.plan.root_columns, None, 1)
        (tokens, parents, depths, _), starts = self._candidates, self.plan.columns_start
        if is_host(tokens.device):  # the op checks what it reads there: columns that are not written yet, absent tokens
            tokens, parents, depths, _ = self.columns
            tokens = tokens.clamp(min=0)
            starts = torch.arange(0, len(tokens) * self.first + 1, self.first, dtype=torch.int32)
        return TreeBatch(tokens.flatten(), parents.flatten(), depths.flatten(), starts, None, tokens.shape[1])

    def _widths(self, logits: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor | None:
        """Returns how many children each row has, int32 [R], where the shape lets its confidence decide (CAPE)."""
        if self.plan.cape is None:
            return None
        if confidence is None:
            sure = (
                torch.tensor(highest_probabilities(logits)) if is_host(logits.device) else logits.softmax(-1).amax(-1)
            )
        else:
            sure = torch.sigmoid(confidence)
        thresholds, widths = self.plan.cape
        return widths[(sure[:, None] > thresholds).sum(-1)]

    @property
    def logits(self) -> torch.Tensor:
        """Float32 [R, Vd], level after level."""
        return stack_rows(self._logits)

    def distributions(self, kept: torch.Tensor, depths: torch.Tensor, limits: torch.Tensor) -> DraftLogits:
        """Returns the distributions of selected trees.

        kept, depths: int32 [B, N], the candidate and the depth of each node.  limits: int32 [B], the deepest levels.
        """
        replacement = self._sampling is not None and self._sampling.replacement
        return DraftLogits(self.logits, self._rows(kept, depths, limits).flatten(), self._vocabulary.index, replacement)

    def _rows(self, kept: torch.Tensor, depths: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """Returns the row of the logits that each node's children come from, int32 [B, N]."""
        depths = depths.view(kept.shape)
        rows = self.plan.logit_rows.gather(1, kept.clamp(min=0).long())
        return torch.where((depths >= 0) & (depths < limits[:, None]), rows, -1).int()

    def trees(self, limits: Sequence[int]) -> tuple[list[DraftTree], list[list[int]]]:
        """Returns the trees on the host, and the row of the logits that each node's children come from, -1: none."""
        deepest = torch.tensor(limits, dtype=torch.int32, device=self._roots.device)
        room = SelectedTrees.empty(len(limits), self.plan.candidates, self._roots.device)
        best = select_nodes(*self.columns, deepest, room)
        rows = self._rows(best.kept, best.depths, deepest)
        columns = (best.node_counts, best.tokens, best.parents, rows)
        cut = [
            (own[0], *(each[: own[0]] for each in own[1:])) for own in zip(*(c.tolist() for c in columns), strict=True)
        ]
        return [DraftTree(own, above) for _, own, above, _ in cut], [known for *_, known in cut]
