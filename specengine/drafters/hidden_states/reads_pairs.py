"""The capabilities that a drafter has by its PairReader and its CalibratedTrees: all kinds of EAGLE, and mtp."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.policy import DraftPolicy
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters.calibrated_trees import CalibratedTrees
from specengine.drafters.capabilities import (
    CacheCompanion,
    DeviceStateDrafter,
    HiddenStateReader,
    NetworkDrafter,
    ScoredDrafter,
)
from specengine.drafters.distributions.level_logits import LevelDistributions
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.hidden_states.device_pairs import DevicePairs
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.drafters.policies import charged
from specengine.models.hidden_states import HiddenStates
from specengine.ops.weight import Projection


class ReadsPairsOnHost(HiddenStateReader, CacheCompanion, ScoredDrafter, LevelDistributions, NetworkDrafter):
    """Forwards capabilities to `pairs`, `calibrated` and `policy`, which the drafter's constructor makes."""

    pairs: PairReader
    calibrated: CalibratedTrees
    policy: DraftPolicy

    @abstractmethod
    def grow(self, requests: Sequence[DraftRequest], min_gain: float = 0.0) -> list[ScoredTree]:
        """Returns the tree of every request, with the drafter's own chances; min_gain: as propose() takes it.

        Every request has at least one unread pair, and room for a drafted token.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft(requests)

    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        if ready := self.pairs.begin_draft(requests):
            for i, tree in zip(ready, self.grow([requests[i] for i in ready], min_gain), strict=True):
                trees[i] = tree
        return self.calibrated.calibrate(requests, trees)

    def levels_for(self, request: DraftRequest) -> int:
        return request.draft_limit if self.pairs.begin_draft([request]) else 0

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        assert hidden_states is not None  # a HiddenStateReader is given them
        self.pairs.observe(draft.requests, committed, hidden_states)
        for request, tokens in zip(draft.requests, committed, strict=True):
            self.calibrated.learn(request, tokens)
        self.policy.observe(draft, committed)

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        self.calibrated.forget(requests)
        self.pairs.skip(requests)

    @property
    def learned(self) -> list[list[float]]:
        return self.calibrated.learned

    def ready(self, requests: Sequence[DraftRequest]) -> int:
        return sum(request.drafter_reads for request in requests)

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        if request.drafter_reads:
            with charged(self.policy, 0, len(hidden_states)):
                self.pairs.observe_prompt(request, start, hidden_states)

    @property
    def page_bytes(self) -> int:
        return self.pairs.page_bytes

    def attach(self, cache: KVCache) -> None:
        self.pairs.attach(cache)

    def filled(self, request: DraftRequest) -> int:
        return self.pairs.filled(request)

    def reads(self, tokens: int, answer: int, batch: int) -> bool:
        return self.policy.reads(0, tokens, answer, batch)

    @property
    def projections(self) -> list[Projection]:
        return self.pairs.network.projections


class ReadsPairs(ReadsPairsOnHost, DeviceStateDrafter):
    """Forwards the capabilities of captured cycles too."""

    def new_device_state(self, slots: int) -> DevicePairs:
        return self.pairs.new_device_state(slots)

    def load(self, state: DevicePairs, slot: int, request: DraftRequest) -> None:
        self.pairs.load(state, slot, request)

    def unload(self, state: DevicePairs, slot: int, request: DraftRequest | None) -> None:
        self.pairs.unload(state, slot, request)

    def before_cycle(self, batch: DraftBatch) -> None:
        self.pairs.before_cycle(batch)

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:
        self.pairs.observe_on_device(batch, hidden_states)
