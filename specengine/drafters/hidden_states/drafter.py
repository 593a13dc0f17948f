"""What drafters share that read pairs of feature and token: keys and values of the pairs stay, beside the target's."""

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
from specengine.drafters.hidden_states.device_pairs import ResidentPairs
from specengine.drafters.hidden_states.pairs import Pairs
from specengine.drafters.scored_drafter import ScoredDrafter
from specengine.models.config import ModelConfig
from specengine.models.hidden_states import Features
from specengine.models.transformer import Transformer
from specengine.ops.weight import Projection

if TYPE_CHECKING:
    from specengine.engine.device.buffers import Slots


MOST_WAITING = 64  # pairs, and cycles without a draft


class PairNetwork(Protocol):
    """config: of its layers.  pick: what of the target's features it reads, [M, ..].  picked_shape: of a position's,
    where the target has so many taps."""

    config: ModelConfig

    def pick(self, features: Features) -> torch.Tensor: ...

    def picked_shape(self, taps: int) -> tuple[int, ...]: ...

    @property
    def projections(self) -> list[Projection]: ...

    def ensure_positions(self, count: int) -> None: ...


@dataclass
class State:
    """What the drafter remembers of one sequence. rests: cycles in a row that drafted nothing of it.
    behind: it has missed pairs, and nothing is drafted of it any more.  batch: the most sequences of a cycle that could
    draft of it.  gained: seconds by drafts, less what reading took apart from them."""

    pairs: Pairs = field(default_factory=Pairs)
    drafted: ScoredTree | None = None
    rests: int = 0
    behind: bool = False
    batch: int = 0
    gained: float = 0.0

    def leave_behind(self) -> None:
        self.pairs, self.behind = Pairs(self.pairs.first), True


class PairDrafter(ScoredDrafter):
    """config: has `adaptive`.  levels: of its deepest tree."""

    takes_path = True
    reads_features = True
    drafts_on_device = True

    def __init__(
        self, config: Any, target: Transformer, network: PairNetwork, taps: tuple[int, ...], levels: int
    ) -> None:
        super().__init__(config, None, target)
        self.network, self.taps, self.levels = network, taps, levels
        c = network.config
        self._kv_shape, self._kv_dtype = (c.num_layers, c.num_kv_heads, c.head_dim), target.cache_dtype
        self._device, self._positions = target.device, target.config.max_position
        self._costs = costs_of(target) if config.adaptive and not target.ops.resident else None
        self._newcomers = Newcomers()

    @abstractmethod
    def _read(self, sequences: Sequence, counts: Sequence[int], drafting: bool = True) -> Any:
        """Caches the first pairs of every sequence; drafting: returns what a draft goes on from."""

    @abstractmethod
    def _trees(self, sequences: Sequence) -> list[ScoredTree]:
        """The largest tree of every sequence, which has at least one pair and room for a drafted token."""

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

    def leaves_unread(self, batch: int) -> bool:
        return self._costs is not None and self._newcomers.unread(batch)

    def observe_prompt(self, sequence, start: int, features: Features) -> None:
        if sequence.drafter_state is None:
            sequence.drafter_state = State(Pairs(start), behind=sequence.unread)
        if sequence.drafter_state.behind:
            return
        pairs = sequence.drafter_state.pairs
        pairs.add(self.network.pick(features))
        if pairs.count > 1:
            self._read_ahead([sequence])

    def filled(self, sequence) -> int:
        return sequence.drafter_state.pairs.first if sequence.drafter_state else 0

    def observe(self, sequences: Sequence, committed: Sequence[list[int]], features: Features | None) -> None:
        assert features is not None  # it reads them
        states = [self._state(sequence) for sequence in sequences]
        if all(state.behind for state in states):
            return
        picked = self.network.pick(features)
        parts = [picked] if len(sequences) == 1 else picked.split([len(tokens) for tokens in committed])
        for sequence, state, tokens, part in zip(sequences, states, committed, parts, strict=True):
            if not state.behind:
                state.pairs.add(part)
                self._learn(sequence, tokens)

    def grow(self, sequences: Sequence) -> list[ScoredTree]:
        trees = [ScoredTree.root(sequence.tokens[-1]) for sequence in sequences]
        # a prompt of one token has no pair yet
        ready = [i for i, s in enumerate(sequences) if self._state(s).pairs.count and s.draft_limit > 0]
        self._note(sequences)
        if ready:
            for i in ready:
                self._state(sequences[i]).rests = 0
            for i, tree in zip(ready, self._trees([sequences[i] for i in ready]), strict=True):
                trees[i] = tree
        return trees

    def rest(self, sequences: Sequence) -> None:
        super().rest(sequences)
        self._note(sequences)
        late = []
        for sequence in sequences:
            state = self._state(sequence)
            state.rests += 1
            if state.pairs.count > MOST_WAITING:
                # Where drafts do not pay, reading what they would need does not either, unless later texts share it.
                if state.rests > MOST_WAITING and not (sequence.sharing and sequence.sharing.answers):
                    state.leave_behind()
                else:
                    late.append(sequence)
        if late:  # what is not read now is read with the next draft, which should not become a long one
            self._read_ahead(late)

    def credit(self, sequences: Sequence, saved: float) -> None:
        states = [state for state in map(self._state, sequences) if not state.behind]
        for state in states:
            state.gained += saved / len(states)

    def release(self, sequence) -> None:
        state, sequence.drafter_state = sequence.drafter_state, None
        if state is not None and state.batch and self._costs is not None:
            self._newcomers.ended(state.batch, state.gained)

    def _read_ahead(self, sequences: Sequence) -> None:
        """All pairs but the last ones, which are drafted from."""
        begin = time.perf_counter()
        self._read(sequences, [self._state(sequence).pairs.count - 1 for sequence in sequences], drafting=False)
        self.credit(sequences, begin - time.perf_counter())

    def _note(self, sequences: Sequence) -> None:
        """A text that could never have been drafted says nothing of those that can."""
        for sequence in sequences:
            state = self._state(sequence)
            if sequence.draft_limit > 0 and not state.behind:
                state.batch = max(state.batch, len(sequences))

    def new_device_state(self, slots: int) -> ResidentPairs:
        return ResidentPairs(slots, self.levels + 1, self.network.picked_shape(len(self.taps)), self._device)

    def load(self, state: ResidentPairs, sequences: Sequence) -> None:
        state.load([self._state(sequence).pairs for sequence in sequences])

    def unload(self, state: ResidentPairs, sequences: Sequence) -> None:
        state.unload([self._state(sequence).pairs for sequence in sequences])

    def observe_on_device(self, slots: Slots, features: Features) -> None:
        slots.drafter_state.observe(slots, self.network.pick(features))

    def _place(self, sequences: Sequence, lengths: Sequence[int]) -> CacheBatch:
        return self._cache.batch([sequence.pages for sequence in sequences], lengths)

    def _pairs(self, sequences: Sequence) -> list[Pairs]:
        return [self._state(sequence).pairs for sequence in sequences]

    @staticmethod
    def _state(sequence) -> State:
        if sequence.drafter_state is None:
            sequence.drafter_state = State(behind=sequence.unread)
        return sequence.drafter_state
