"""Drafts with a network: what EAGLE, FastEagle, Medusa, GLIDE, block drafters, PARD and draft models have in common.

A network gives logits (growth.py), a reader what it reads of the text (reader.py), a shape says how trees grow
(draft_trees/shapes.py). Everything else is here, once: the policy, learned chances, trees for rules that read
distributions, and drafts inside captured cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.policy import Source
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.shapes import Beam, BestFirst, Ranks, Shape
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.drafters.calibrated_trees import CalibratedTrees
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.drafter import Drafter
from specengine.drafters.drawn_trees import DrawnTrees, Sampling
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.growth import Begun, DraftNetwork, grow, scored_trees
from specengine.drafters.native import NativeDraft
from specengine.drafters.policies import charged, policy_of
from specengine.drafters.reader import Reader
from specengine.drafters.root_tokens import root_trees
from specengine.models.transformer import Transformer
from specengine.ops.growth.best_first_trees import BestFirstTrees
from specengine.ops.growth.expand_levels import DepthLimits
from specengine.ops.growth.growing_trees import GrowingTrees
from specengine.ops.growth.growth_plan import GrowthPlan
from specengine.ops.weight import Projection
from specengine.rules.base import Wants

if TYPE_CHECKING:
    from specengine.models.hidden_states import HiddenStates


class NetworkConfig(Protocol):
    """Options that all network drafters have.

    adaptive: keep the nodes that pay, otherwise the largest tree.  sample: draw the children from the drafter's
    distributions, for rules that read them.
    """

    @property
    def adaptive(self) -> bool: ...
    @property
    def sample(self) -> bool: ...


class NetworkDrafter(Drafter, Source):
    """Drafts trees of one network.

    A subclass loads a checkpoint and calls prepare(): network gives the logits, reader reads the text, shape is that of
    plain trees, drawn_shape that of trees whose distributions a rule reads; it knows nothing of what is drafted.
    columns: the tokens of the logits.  projections: its linear layers.  replacement: whether siblings are drawn
    with replacement.
    native: a whole draft on the CPU; None: there the network is called level by level.
    """

    takes_path = True
    offers = frozenset(Wants)
    drafts_in_cycle = True
    config: NetworkConfig
    native: NativeDraft | None = None

    def prepare(
        self,
        target: Transformer,
        *,
        network: DraftNetwork,
        reader: Reader,
        shape: Shape,
        drawn_shape: Beam | Ranks,
        columns: DraftVocabulary,
        projections: Sequence[Projection],
        nodes: int,
        slots: int = 0,
        replacement: bool = False,
        costs: CycleCosts | None = None,
    ) -> None:
        """Takes the parts that the constructor has made. nodes: the largest tree's.  slots: those a draft writes to."""
        self.network, self.reader, self.columns = network, reader, columns
        self.shape, self.drawn_shape, self._projections = shape, drawn_shape, list(projections)
        self.replacement = replacement
        self.hidden_state_layers, self.reads_hidden_states = reader.hidden_state_layers, reader.reads_hidden_states
        self.device, self._nodes, self._slots = target.device, nodes, max(nodes, slots)
        self.calibrated = CalibratedTrees(self.name)
        self.policy = policy_of(self, target, costs, [self])
        self._plans: dict[tuple[Shape, int, int], GrowthPlan] = {}  # by levels and batch size; graphs hold on to them
        self._levels, self._drafted = 0, False  # of the last draft; by one native call since the last observation

    @property
    def projections(self) -> list[Projection]:
        return self._projections

    @property
    def page_bytes(self) -> int:
        return self.reader.page_bytes

    @property
    def device_rows(self) -> int:
        return self.reader.device_rows

    @property
    def max_nodes(self) -> int:
        return self._nodes

    @property
    def spare_slots(self) -> int:
        return self._slots

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return self.shape.is_chain

    # Drafts on the host

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft(requests)

    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        """Returns a tree per request, with the learned chance of each node. See draft_policy.Source."""
        self._levels = 0
        trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        if able := self._able(requests):
            for i, tree in zip(able, self.grow([requests[i] for i in able], min_gain), strict=True):
                trees[i] = tree
        return self.calibrated.calibrate(requests, trees)

    def grow(self, requests: Sequence[DraftRequest], min_gain: float = 0.0) -> list[ScoredTree]:
        """Returns the tree of every request, with the network's own chances; each can be drafted for."""
        limits = self._limits(requests)
        levels = min(self.shape.levels, max(limits))
        if self.native:
            self._drafted = True
            drafted, self._levels = self.native(self.reader.unread(requests), limits, levels, min_gain)
            return drafted
        opened = self.reader.open(requests, levels)
        deepest = torch.tensor(limits, dtype=torch.int32, device=self.device)
        trees = self._growing(opened, levels, DepthLimits(deepest), self.max_nodes)
        self._levels = min(levels, grow(self.network.draft(opened, levels), trees, min_gain))
        return scored_trees(trees.columns, deepest, self.max_nodes)

    def drafted_levels(self, trees: Sequence[ScoredTree]) -> int:
        """Returns how many levels the last propose() drafted, which took its time."""
        return self._levels

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        """Notes that this cycle drafts nothing for these requests."""
        self.calibrated.forget(requests)
        self.reader.skip(requests)

    def ready(self, requests: Sequence[DraftRequest]) -> int:
        """Returns for how many of these requests it can draft."""
        return sum(self._follows(request) for request in requests)

    @property
    def learned(self) -> list[list[float]]:
        """All that it has learned of chances; the next process fills the lists again."""
        return self.calibrated.learned

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        if self._drafted and self.native:  # the next cycle probably drafts too
            self._drafted = False
            self.native.fetch()
        self.reader.observe(draft.requests, committed, hidden_states)
        for request, tokens in zip(draft.requests, committed, strict=True):
            self.calibrated.learn(request, tokens)
        self.policy.observe(draft, committed)

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        if self._follows(request):
            with charged(self.policy, 0, len(hidden_states)):
                self.reader.observe_prompt(request, start, hidden_states)

    def attach(self, cache: KVCache) -> None:
        self.reader.attach(cache)

    def filled(self, request: DraftRequest) -> int:
        return self.reader.filled(request)

    def reads(self, tokens: int, answer: int, batch: int) -> bool:
        return not self.page_bytes or self.policy.reads(0, tokens, answer, batch)  # otherwise reading takes no time

    # Trees whose distributions a rule reads

    def gives_logits(self, wants: Wants) -> bool:
        return wants in (Wants.SAMPLED_ONLY, Wants.PROBABILITIES) or (wants is Wants.SAMPLES and self.config.sample)

    def draft_for(self, wants: Wants, requests: Sequence[DraftRequest]) -> Draft:
        """Drafts trees of the drawn shape where the rule reads distributions: children are drawn or the likeliest."""
        if not self.gives_logits(wants):
            return self.draft(requests)
        trees = [DraftTree(request.tokens[-1:], [-1]) for request in requests]
        rows, logits = [[-1] for _ in requests], torch.empty(0, self.columns.count, device=self.device)
        if able := self._able(requests):
            drafted = [requests[i] for i in able]
            limits = self._limits(drafted)  # as long as there is unread text
            sampling = Sampling.of(drafted, self.device, replacement=self.replacement)
            drawn = self.draw(drafted, None if wants is Wants.PROBABILITIES else sampling)
            logits = drawn.logits
            for i, tree, own in zip(able, *drawn.trees(limits), strict=True):
                trees[i], rows[i] = tree, own
        places = torch.tensor([row for own in rows for row in own], dtype=torch.int32, device=self.device)
        return Draft(requests, trees, DraftLogits(logits, places, self.columns.index, self.replacement))

    def draw(self, requests: Sequence[DraftRequest], sampling: Sampling | None) -> DrawnTrees:
        """Grows trees of the drawn shape for requests that can be drafted for."""
        levels = min(self.drawn_shape.levels, max(self._limits(requests)))
        opened = self.reader.open(requests, levels)
        drawn = self._drawing(opened, levels, sampling)
        grow(self.network.draft(opened, levels), drawn)
        return drawn

    def room_for_logits(self, nodes: int) -> DraftLogits:
        """Returns buffers for the distributions of `nodes` nodes in all, of trees that the host drafts."""
        rows = torch.full((nodes,), -1, dtype=torch.int32, device=self.device)
        logits = torch.zeros(nodes, self.columns.count, device=self.device)
        return DraftLogits(logits, rows, self.columns.index, self.replacement)

    # Captured cycles

    def new_device_state(self, slots: int) -> Any:
        return self.reader.new_device_state(slots)

    def load(self, state: Any, slot: int, request: DraftRequest) -> None:
        self.reader.load(state, slot, request)

    def unload(self, state: Any, slot: int, request: DraftRequest | None) -> None:
        self.reader.unload(state, slot, request)

    def before_cycle(self, batch: DraftBatch) -> None:
        self.reader.before_cycle(batch)

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:
        self.reader.observe_on_device(batch, hidden_states)

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        """Drafts inside a captured cycle, from device tensors alone: a graph reads no host memory.

        Returns one tree of batch.nodes rows per slot; sets batch.draft_logits where the rule reads distributions.
        """
        reads_logits = self.gives_logits(batch.wants)
        levels = min((self.drawn_shape if reads_logits else self.shape).levels, batch.nodes - 1)
        if not levels:
            return root_trees(batch)  # what it has not read waits for a later draft
        opened = self.reader.open_on_device(batch, levels)
        if not reads_logits:
            limits = DepthLimits(None, batch.history.length, batch.limits.final_length, batch.limits.active)
            trees = self._growing(opened, levels, limits, min(self.max_nodes, batch.nodes))
            grow(self.network.draft(opened, levels), trees)
            return batch.selected(*trees.columns, opened.known, levels)
        sampling = Sampling(batch.params, batch.history, replacement=self.replacement)
        drawn = self._drawing(opened, levels, None if batch.wants is Wants.PROBABILITIES else sampling)
        grow(self.network.draft(opened, levels), drawn)
        tree = batch.selected(*drawn.columns, opened.known, levels)
        batch.draft_logits = drawn.distributions(batch.kept, tree.depths, batch.draft_limits(levels))
        return tree

    def _able(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Returns which of the requests can be drafted for."""
        return [i for i, s in enumerate(requests) if self._follows(s) and self.reader.limit(s) > 0]

    def _follows(self, request: DraftRequest) -> bool:
        """Returns whether it reads a request; what keeps nothing beside the target's cache reads all."""
        return request.drafter_reads or not self.page_bytes

    def _limits(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Returns the deepest level of each request's tree."""
        return [self.reader.limit(request) for request in requests]

    def _growing(self, opened: Begun, levels: int, limits: DepthLimits, nodes: int) -> GrowingTrees:
        """Begins trees of the likeliest nodes."""
        plan = self._plan(self.shape, levels, len(opened.known))
        place = (opened.roots, opened.known, self.columns.tokens)
        kind = BestFirstTrees if isinstance(self.shape, BestFirst) else GrowingTrees
        return kind(plan, *place, limits=limits, nodes=nodes, origin=opened.origin)

    def _drawing(self, opened: Begun, levels: int, sampling: Sampling | None) -> DrawnTrees:
        """Begins trees whose distributions are kept."""
        plan = self._plan(self.drawn_shape, levels, len(opened.known))
        return DrawnTrees(plan, opened.roots, opened.known, self.columns, sampling, opened.origin)

    def _plan(self, shape: Shape, levels: int, batch: int) -> GrowthPlan:
        key = (shape, levels, batch)
        if key not in self._plans:
            self._plans[key] = GrowthPlan.of(shape.first_levels(levels), batch, self.device)
        return self._plans[key]
