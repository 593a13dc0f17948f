"""What drafters share that read pairs of hidden state and token: keys and values of the pairs stay, beside the target's."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.cache.page_pool import page_bytes
from specengine.draft_policy.cost_model import costs_of
from specengine.draft_policy.pauses import Newcomers
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters.hidden_states.device_pairs import DevicePairs
from specengine.drafters.hidden_states.pairs import Pairs
from specengine.drafters.scored_drafter import ScoredDrafter
from specengine.models.config import ModelConfig
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.weight import Projection

if TYPE_CHECKING:
    from specengine.engine.device.graph_batch import GraphBatch


MOST_WAITING = 64  # pairs, and cycles without a draft


class PairNetwork(Protocol):
    """config: of its layers.  pick: what of the target's hidden states it reads, [M, ..].  picked_shape: of a position's,
    where the target has so many hidden_state_layers."""

    config: ModelConfig

    def pick(self, hidden_states: HiddenStates) -> torch.Tensor: ...

    def picked_shape(self, hidden_state_layers: int) -> tuple[int, ...]: ...

    @property
    def projections(self) -> list[Projection]: ...

    def ensure_positions(self, count: int) -> None: ...


@dataclass
class State:
    """What the drafter remembers of one request. rests: cycles in a row that drafted nothing of it.
    behind: it has missed pairs, and nothing is drafted of it any more.  batch: the most requests of a cycle that could
    draft of it.  gained: seconds by drafts, less what reading took apart from them."""

    pairs: Pairs = field(default_factory=Pairs)
    drafted: ScoredTree | None = None
    rests: int = 0
    behind: bool = False
    batch: int = 0
    gained: float = 0.0

    def leave_behind(self) -> None:
        self.pairs, self.behind = Pairs(self.pairs.first), True


class HiddenStateDrafter(ScoredDrafter):
    """config: has `adaptive`.  levels: of its deepest tree."""

    takes_path = True
    reads_hidden_states = True
    drafts_on_device = True

    def __init__(
        self, config: Any, target: Transformer, network: PairNetwork, hidden_state_layers: tuple[int, ...], levels: int
    ) -> None:
        super().__init__(config, None, target)
        self.network, self.hidden_state_layers, self.levels = network, hidden_state_layers, levels
        c = network.config
        self._kv_shape, self._kv_dtype = (c.num_layers, c.num_kv_heads, c.head_dim), target.cache_dtype
        self._device, self._positions = target.device, target.config.max_position
        self._costs = costs_of(target) if config.adaptive and not target.ops.resident else None
        self._newcomers = Newcomers()

    @abstractmethod
    def _read(self, requests: Sequence, counts: Sequence[int], drafting: bool = True) -> Any:
        """Caches the first pairs of every request; drafting: returns what a draft goes on from."""

    @abstractmethod
    def _trees(self, requests: Sequence) -> list[ScoredTree]:
        """The largest tree of every request, which has at least one pair and room for a drafted token."""

    @property
    def projections(self) -> list[Projection]:
        return self.network.projections

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def page_bytes(self) -> int:
        return page_bytes(self._kv_shape, self._kv_dtype)

    def attach(self, cache: KVCache) -> None:
        self._attach_once()
        self._cache = cache
        if cache.fixed:
            # a captured graph holds on to the tables, and drafts past the end of the context too
            self.network.ensure_positions(self._positions + self.levels)
        self._pool = cache.companion(*self._kv_shape, self._kv_dtype)

    def skips_reading(self, batch: int) -> bool:
        return self._costs is not None and self._newcomers.unread(batch)

    def observe_prompt(self, request, start: int, hidden_states: HiddenStates) -> None:
        if request.drafter_state is None:
            request.drafter_state = State(Pairs(start), behind=request.skips_drafter_cache)
        if request.drafter_state.behind:
            return
        pairs = request.drafter_state.pairs
        pairs.add(self.network.pick(hidden_states))
        if pairs.count > 1:
            self._read_ahead([request])

    def filled(self, request) -> int:
        return request.drafter_state.pairs.first if request.drafter_state else 0

    def observe(self, requests: Sequence, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        assert hidden_states is not None  # it reads them
        states = [self._state(request) for request in requests]
        if all(state.behind for state in states):
            return
        picked = self.network.pick(hidden_states)
        parts = [picked] if len(requests) == 1 else picked.split([len(tokens) for tokens in committed])
        for request, state, tokens, part in zip(requests, states, committed, parts, strict=True):
            if not state.behind:
                state.pairs.add(part)
                self._learn(request, tokens)

    def grow(self, requests: Sequence) -> list[ScoredTree]:
        trees = [ScoredTree.root(request.tokens[-1]) for request in requests]
        # a prompt of one token has no pair yet
        ready = [i for i, s in enumerate(requests) if self._state(s).pairs.count and s.draft_limit > 0]
        self._note(requests)
        if ready:
            for i in ready:
                self._state(requests[i]).rests = 0
            for i, tree in zip(ready, self._trees([requests[i] for i in ready]), strict=True):
                trees[i] = tree
        return trees

    def rest(self, requests: Sequence) -> None:
        super().rest(requests)
        self._note(requests)
        late = []
        for request in requests:
            state = self._state(request)
            state.rests += 1
            if state.pairs.count > MOST_WAITING:
                # Where drafts do not pay, reading what they would need does not either, unless later texts share it.
                if state.rests > MOST_WAITING and not (request.sharing and request.sharing.answers):
                    state.leave_behind()
                else:
                    late.append(request)
        if late:  # what is not read now is read with the next draft, which should not become a long one
            self._read_ahead(late)

    def credit(self, requests: Sequence, saved: float) -> None:
        states = [state for state in map(self._state, requests) if not state.behind]
        for state in states:
            state.gained += saved / len(states)

    def release(self, request) -> None:
        state, request.drafter_state = request.drafter_state, None
        if state is not None and state.batch and self._costs is not None:
            self._newcomers.ended(state.batch, state.gained)

    def _read_ahead(self, requests: Sequence) -> None:
        """All pairs but the last ones, which are drafted from."""
        begin = time.perf_counter()
        self._read(requests, [self._state(request).pairs.count - 1 for request in requests], drafting=False)
        self.credit(requests, begin - time.perf_counter())

    def _note(self, requests: Sequence) -> None:
        """A text that could never have been drafted says nothing of those that can."""
        for request in requests:
            state = self._state(request)
            if request.draft_limit > 0 and not state.behind:
                state.batch = max(state.batch, len(requests))

    def new_device_state(self, slots: int) -> DevicePairs:
        return DevicePairs(
            slots, self.levels + 1, self.network.picked_shape(len(self.hidden_state_layers)), self._device
        )

    def load(self, state: DevicePairs, requests: Sequence) -> None:
        state.load([self._state(request).pairs for request in requests])

    def unload(self, state: DevicePairs, requests: Sequence) -> None:
        state.unload([self._state(request).pairs for request in requests])

    def observe_on_device(self, slots: GraphBatch, hidden_states: HiddenStates) -> None:
        slots.drafter_state.observe(slots, self.network.pick(hidden_states))

    def _place(self, requests: Sequence, lengths: Sequence[int]) -> CacheBatch:
        return self._cache.batch([request.pages for request in requests], lengths)

    def _pairs(self, requests: Sequence) -> list[Pairs]:
        return [self._state(request).pairs for request in requests]

    @staticmethod
    def _state(request) -> State:
        if request.drafter_state is None:
            request.drafter_state = State(behind=request.skips_drafter_cache)
        return request.drafter_state
