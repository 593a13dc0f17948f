"""A cycle's state on the device: static tensors that captured graphs read and write, and views of them.

The engine has one DeviceBuffers. A cycle works on GraphBatch: the first few requests of the state with trees of a fixed
number of nodes. GraphBatch have the interface of a Batch, so the engine's one cycle runs on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.drafters.base import Drafter
from specengine.engine.request import Request
from specengine.models.hidden_states import HiddenStates
from specengine.ops.commit_tokens import Limits, commit_tokens, record_width
from specengine.ops.draft_lookup import draft_lookup
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.select_nodes import SelectedTrees, select_nodes
from specengine.ops.verify_tree import Accepted, VerifyWorkspace
from specengine.rules import Rule
from specengine.types import SamplingParams
from specengine.utils.timers import DeviceClock, HostClock

MAX_BIASES = 1024  # entries of logit_bias of all requests of a batch


class DeviceBuffers:
    """Room for `slots` requests of up to `positions` tokens; idle slots are padding in every op.

    spare: slots of the cache behind the longest text.  rows: of the largest pass.  draft_logits: as many rows, where
    the rule wants them.  weights: whether the rule works with them, as all do but `match`.  drafter_state: what the
    drafter keeps there.
    """

    def __init__(
        self,
        slots: int,
        positions: int,
        spare: int,
        rows: int,
        vocab: int,
        eos: Sequence[int],
        device: torch.device,
        draft_logits: DraftLogits | None = None,
        weights: bool = False,
        drafter_state: Any = None,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.size, self.device, self.vocab = slots, device, vocab
        pages = -(-(positions + spare) // PAGE_SIZE)
        self.cache = CacheBatch(zeros(slots, pages), zeros(slots))
        self.history = TokenHistory(zeros(slots, positions + spare), torch.ones_like(zeros(slots)), zeros(slots))
        self.limits = Limits(
            torch.tensor(sorted(eos), dtype=torch.int32, device=device), *(zeros(slots) for _ in "ifa")
        )
        idle = SamplingTable.of([SamplingParams()] * slots, [0] * slots)
        self.params = idle.to(device)
        self.params = SamplingTable(
            **{f.name: getattr(self.params, f.name) for f in fields(SamplingTable) if "bias_" not in f.name},
            bias_start=zeros(slots + 1),
            bias_tokens=zeros(MAX_BIASES),
            bias_values=zeros(MAX_BIASES, dtype=torch.float32),
        )
        self.workspace = VerifyWorkspace.empty(slots, vocab, rows=rows, device=device, weights=weights)
        self.draft_logits, self.drafter_state = draft_logits, drafter_state

    def check_biases(self, params: SamplingParams) -> None:
        """Raises ValueError where there is no room for the biases of a request."""
        count = len(params.logit_bias or {})
        if count > MAX_BIASES:
            raise ValueError(f"logit_bias: has {count} entries, at most {MAX_BIASES} fit")

    def has_room(self, requests: Sequence[Request]) -> bool:
        """Whether there is room for the biases of all requests of a batch."""
        return sum(len(s.params.logit_bias or {}) for s in requests) <= MAX_BIASES

    def load(self, requests: Sequence[Request]) -> None:
        """Takes the requests into the first slots; the others become idle."""
        count = len(requests)

        def put(target: torch.Tensor, values: Sequence, rows: slice = slice(0, count)) -> None:
            if len(values):
                host = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))
                target[rows].copy_(host, non_blocking=True)

        self.limits.active.zero_()
        table = SamplingTable.of([s.params for s in requests], [s.seed for s in requests])
        for name in (f.name for f in fields(SamplingTable)):
            values = getattr(table, name)
            put(getattr(self.params, name), values, slice(0, len(values)))
        self.params.bias_start[count + 1 :].copy_(self.params.bias_start[count])
        for slot, request in enumerate(requests):
            put(self.history.tokens[slot], request.tokens, slice(0, len(request.tokens)))
            put(self.cache.block_table[slot], request.pages, slice(0, len(request.pages)))
        put(self.history.length, [len(s.tokens) for s in requests])
        put(self.history.prompt_length, [s.prompt_length for s in requests])
        put(self.cache.lengths, [len(s.tokens) - 1 for s in requests])
        put(self.limits.ignores_eos, [int(s.params.ignore_eos) for s in requests])
        put(self.limits.final_length, [s.prompt_length + s.limit for s in requests])
        put(self.limits.active, [int(s.finish_reason is None) for s in requests])


class GraphBatch:
    """The first `size` slots of a state with trees of `nodes` nodes each.

    record: int32 [size, record_width(nodes)], what the host reads of a cycle.  scores, hidden states, accepted: of the last
    pass.
    clock: of the cycle's phases, where somebody wants to know.
    """

    reads_logits = True  # requests come and go under a captured graph: it must serve all of their parameters
    accepted: Accepted
    hidden_states: HiddenStates

    def __init__(self, state: DeviceBuffers, size: int, nodes: int) -> None:
        self.size, self.nodes = size, nodes

        def first(table):
            return type(table)(**{f.name: getattr(table, f.name)[:size] for f in fields(table)})

        self.cache, self.history = first(state.cache), first(state.history)
        limits, params = state.limits, state.params
        self.limits = Limits(limits.eos, *(getattr(limits, f.name)[:size] for f in fields(Limits)[1:]))
        biases = {"bias_start": params.bias_start[: size + 1], "bias_tokens": params.bias_tokens}
        rest = {f.name: getattr(params, f.name)[:size] for f in fields(params) if "bias_" not in f.name}
        self.params = SamplingTable(**rest, **biases, bias_values=params.bias_values)
        self.workspace = state.workspace.part(size, size * nodes)
        device, rows = state.device, size * nodes
        self.row_start = torch.arange(0, rows + 1, nodes, dtype=torch.int32, device=device)
        self.record = torch.zeros(size, record_width(nodes), dtype=torch.int32, device=device)
        tokens, parents, depths = (torch.full((rows,), -1, dtype=torch.int32, device=device) for _ in range(3))
        self._ancestors = torch.zeros(rows, -(-nodes // 32), dtype=torch.int32, device=device)
        self._tree = TreeBatch(tokens, parents, depths, self.row_start, self._ancestors, nodes)
        self._selected = SelectedTrees.empty(size, nodes, device)
        logits = state.draft_logits
        self.draft_logits = logits and replace(logits, logits=logits.logits[:rows], rows=logits.rows[:rows])
        self.drafter_state = state.drafter_state
        self.scores = torch.empty(0)
        self.clock: HostClock | DeviceClock | None = None

    def draft(self, drafter: Drafter, rule: Rule) -> TreeBatch:
        return drafter.draft_on_device(self) if drafter.drafts_on_device else self._tree

    def lookup(self, ngrams: tuple[int, int]) -> TreeBatch:
        """Trees drafted by prompt lookup; see ops.draft_lookup."""
        history, limits = self.history, self.limits
        state = (history.tokens, history.length, limits.final_length, limits.active)
        return draft_lookup(*state, self.row_start, self.nodes, ngrams)

    def selected(self, tokens, parents, depths, scores, limits) -> TreeBatch:
        """The best candidates of every running request, as many as a tree has nodes here; see ops.select_nodes.

        limits: int32 [B], the deepest level wanted; none is kept that could not be committed.
        """
        room = self.limits.final_length - self.history.length - 1
        limits = torch.where(self.limits.active == 0, -1, torch.minimum(limits, room).clamp(min=0)).int()
        trees = select_nodes(tokens, parents, depths, scores, limits, self._selected)
        tokens, parents, depths = (column.view(-1) for column in (trees.tokens, trees.parents, trees.depths))
        return TreeBatch(tokens, parents, depths, self.row_start, trees.ancestors.view(len(tokens), -1), self.nodes)

    def take(self, trees: Sequence[DraftTree], logits: DraftLogits | None) -> None:
        """Trees that were drafted on the host, one per running request, and what the rule wants to know of them; nodes
        beyond the width are left out."""
        shape = (self.size, self.nodes)
        batch = TreeBatch.of(trees, torch.device("cpu"), masked=True)
        starts, words = batch.row_start.tolist(), self._ancestors.shape[1]

        def padded(column: torch.Tensor) -> np.ndarray:
            rows = np.full(shape, -1, dtype=np.int32)
            for b, first in enumerate(starts[:-1]):
                count = min(self.nodes, starts[b + 1] - first)
                rows[b, :count] = column[first : first + count]
            return rows.reshape(-1)

        for name in ("tokens", "parents", "depths"):
            getattr(self._tree, name).copy_(torch.from_numpy(padded(getattr(batch, name))), non_blocking=True)
        if logits is not None:
            assert self.draft_logits is not None  # of the drafter's room_for_logits
            _take_logits(self.draft_logits, logits.logits, padded(logits.rows.cpu()))
        bits = np.zeros((*shape, words), dtype=np.int32)
        assert batch.ancestors is not None  # masked
        for b, first in enumerate(starts[:-1]):
            count = min(self.nodes, starts[b + 1] - first)
            own = batch.ancestors[first : first + count, :words]
            bits[b, :count, : own.shape[1]] = own
        self._ancestors.copy_(torch.from_numpy(bits).view(-1, words), non_blocking=True)

    def commit(self, tree: TreeBatch, accepted: Accepted, scores: torch.Tensor) -> None:
        self.scores, self.accepted = scores, accepted
        commit_tokens(tree, accepted, self.history, self.limits, self.record)

    def observe(self, drafter: Drafter, hidden_states: HiddenStates) -> None:
        self.hidden_states = hidden_states
        drafter.observe_on_device(self, hidden_states)

    def mark(self, phase: str) -> None:
        """Notes that a phase has ended."""
        if self.clock:
            self.clock.mark(phase)


def _take_logits(room: DraftLogits, logits: torch.Tensor, rows: np.ndarray) -> None:
    """room: what they are written to.  logits: [R, Vd] of the whole trees.  rows: of the nodes that are kept."""
    known = rows >= 0
    kept = torch.from_numpy(rows[known]).to(logits.device)
    rows[known] = np.arange(len(kept))
    room.logits[: len(kept)] = logits[kept]
    room.rows.copy_(torch.from_numpy(rows), non_blocking=True)
