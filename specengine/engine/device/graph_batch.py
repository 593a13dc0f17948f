"""A batch on the device: views of the first slots of the device buffers, with trees of a fixed number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from specengine.constraints import Constraint
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import ExtraCandidates
from specengine.drafters.root_tokens import root_trees
from specengine.engine.device.buffers import DeviceBuffers
from specengine.models.hidden_states import HiddenStates
from specengine.ops.commit_tokens import Limits, commit_tokens, record_width
from specengine.ops.draft_lookup import draft_lookup
from specengine.ops.sampling_table import SamplingTable
from specengine.ops.select_nodes import SelectedTrees, select_limited
from specengine.ops.verify_tree import Accepted
from specengine.rules import Rule
from specengine.rules.base import Wants
from specengine.utils.timers import DeviceClock, HostClock

Table = TypeVar("Table", bound=Any)


class GraphBatch:
    """The first `size` slots with trees of `nodes` nodes each; a captured graph runs the cycle on it.

    record: int32 [size, record_width(nodes)], copied to the host after each cycle.
    hidden_states, accepted: of the last pass.  choices: int32 [size * nodes], the likeliest token of each of its rows,
    for a drafter that reads them. Its logits are not kept: they would take most of the memory of all captured cycles.
    masked: whether its requests may be constrained; then no graph runs its cycles, because the host fills the masks.
    constraints: of the slots in the next cycle, where it is masked.
    clock: of the cycle's phases, while they are timed.
    """

    reads_logits = True  # a captured graph serves the parameters of every later request
    reads_forbidden = True  # the host fills the masks while the head runs
    accepted: Accepted
    hidden_states: HiddenStates
    extra_candidates: ExtraCandidates | None = None
    choices: torch.Tensor

    def __init__(
        self, buffers: DeviceBuffers, size: int, nodes: int, masked: bool = False, wants: Wants = Wants.NOTHING
    ) -> None:
        self.size, self.nodes, self.wants = size, nodes, wants
        self._room_for_masks = buffers.masks if masked else None
        self.masks: torch.Tensor | None = None
        self.constraints: Sequence[Constraint | None] = ()
        device, rows = buffers.device, size * nodes
        self.cache, self.history = buffers.cache.first(size), _first(buffers.history, size)
        self.limits, self.params = _first_limits(buffers.limits, size), _first_params(buffers.params, size)
        self.workspace = buffers.workspace.part(size, rows)
        self.row_start = torch.arange(0, rows + 1, nodes, dtype=torch.int32, device=device)
        self.record = torch.zeros(size, record_width(nodes), dtype=torch.int32, device=device)
        tokens, parents, depths = (torch.full((rows,), -1, dtype=torch.int32, device=device) for _ in range(3))
        self._ancestors = torch.zeros(rows, -(-nodes // 32), dtype=torch.int32, device=device)
        self._tree = TreeBatch(tokens, parents, depths, self.row_start, self._ancestors, nodes)
        self._selected = SelectedTrees.empty(size, nodes, device)
        logits = buffers.draft_logits
        self.draft_logits = logits and replace(logits, logits=logits.logits[:rows], rows=logits.rows[:rows])
        self.drafter_state = buffers.drafter_state
        self._scores: torch.Tensor | None = None
        self.clock: HostClock | DeviceClock | None = None

    def draft(self, drafter: Drafter, rule: Rule) -> TreeBatch:
        """Drafts on the device, or returns the trees that take() copied from the host; a root needs no copy."""
        if drafter.drafts_in_cycle:
            tree = drafter.draft_on_device(self)
        else:
            tree = root_trees(self) if self.nodes == 1 else self._tree
        if self._room_for_masks:
            self._room_for_masks.begin(tree)
        return tree

    def lookup(self, ngrams: tuple[int, int]) -> TreeBatch:
        """Drafts by prompt lookup; see ops.draft_lookup."""
        history, limits = self.history, self.limits
        return draft_lookup(
            history.tokens, history.length, limits.final_length, limits.active, self.row_start, self.nodes, ngrams
        )

    def selected(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        scores: torch.Tensor,
        known: torch.Tensor,
        levels: int,
    ) -> TreeBatch:
        """Cuts the candidates of every request to the best `nodes`; see ops.select_nodes.select_limited.

        known: int32 [B], 0: only the root is wanted.  levels: the deepest level wanted. Deeper nodes than a request can
        commit are cut too.
        """
        place = (self.history.length, self.limits.final_length, self.limits.active)
        columns = (tokens, parents, depths, scores)
        if self.extra_candidates:
            columns, known = self.extra_candidates(self, columns, known, levels)
        trees = select_limited(columns, known, *place, levels, self._selected)
        tokens, parents, depths = (column.view(-1) for column in (trees.tokens, trees.parents, trees.depths))
        return TreeBatch(tokens, parents, depths, self.row_start, trees.ancestors.view(len(tokens), -1), self.nodes)

    @property
    def kept(self) -> torch.Tensor:
        """Int32 [size, nodes], the candidates that selected() kept."""
        return self._selected.kept

    def draft_limits(self, levels: int) -> torch.Tensor:
        """Returns the deepest level of each request that can be committed, int32 [size]; at most `levels`."""
        return (self.limits.final_length - self.history.length - 1).clamp(max=levels)

    def take(self, draft: Draft, slots: Sequence[int]) -> None:
        """Copies trees that were drafted on the host, one per running request, to the requests' slots.

        Drops the last nodes in drafting order of a tree that is wider than this batch.
        """
        shape = (self.size, self.nodes)
        batch = TreeBatch.of(draft.trees, torch.device("cpu"), masked=True)
        starts, words = batch.row_start.tolist(), self._ancestors.shape[1]
        counts = [min(self.nodes, end - first) for first, end in pairwise(starts)]
        places = list(zip(slots, starts[:-1], counts, strict=True))

        def padded(column: torch.Tensor) -> np.ndarray:
            rows = np.full(shape, -1, dtype=np.int32)
            for slot, first, count in places:
                rows[slot, :count] = column[first : first + count]
            return rows.reshape(-1)

        for name in ("tokens", "parents", "depths"):
            getattr(self._tree, name).copy_(torch.from_numpy(padded(getattr(batch, name))), non_blocking=True)
        if (logits := draft.logits) is not None:
            assert self.draft_logits is not None  # the drafter's room_for_logits made them
            _copy_logits(self.draft_logits, logits.logits, padded(logits.rows.cpu()))
        bits = np.zeros((*shape, words), dtype=np.int32)
        assert batch.ancestors is not None  # masked=True
        for slot, first, count in places:
            own = batch.ancestors[first : first + count, :words]
            bits[slot, :count, : own.shape[1]] = own
        self._ancestors.copy_(torch.from_numpy(bits).view(-1, words), non_blocking=True)

    def fill_masks(self, tree: TreeBatch) -> None:
        """Fills the masks on the host while the target runs, and copies them to the device."""
        if self._room_for_masks:
            self.masks = self._room_for_masks.fill(self.constraints, self.nodes)

    def commit(self, tree: TreeBatch, accepted: Accepted, scores: torch.Tensor) -> None:
        """Appends accepted tokens and bonus tokens to the histories on the device, and writes the record."""
        self._scores, self.accepted = scores, accepted
        commit_tokens(tree, accepted, self.history, self.cache.lengths, self.limits, self.record)

    def observe(self, drafter: Drafter, hidden_states: HiddenStates) -> None:
        """Shows the drafter the hidden states of all rows, and keeps what it reads of the logits."""
        self.hidden_states = hidden_states
        if drafter.reads_choices:
            assert self._scores is not None  # commit() comes first
            self.choices = self._scores.argmax(-1).int()
        self._scores = None
        if drafter.drafts_in_cycle:
            self.draft_logits = None  # the next graph's take their memory
        if self.drafter_state is not None:
            drafter.observe_on_device(self, hidden_states)

    def mark(self, phase: str) -> None:
        """Ends a phase of the cycle, while phases are timed."""
        if self.clock:
            self.clock.mark(phase)


def _first(table: Table, size: int) -> Table:
    return type(table)(**{f.name: getattr(table, f.name)[:size] for f in fields(table)})


def _first_limits(limits: Limits, size: int) -> Limits:
    return Limits(limits.eos, limits.ignores_eos[:size], limits.final_length[:size], limits.active[:size])


def _first_params(params: SamplingTable, size: int) -> SamplingTable:
    return SamplingTable(
        **{f.name: getattr(params, f.name)[:size] for f in fields(params) if "bias_" not in f.name},
        bias_start=params.bias_start[: size + 1],
        bias_tokens=params.bias_tokens,
        bias_values=params.bias_values,
    )


def _copy_logits(buffers: DraftLogits, logits: torch.Tensor, rows: np.ndarray) -> None:
    """Copies the logits of the kept nodes.  logits: [R, Vd] of the whole trees.  rows: of the nodes, -1 for padding."""
    known = rows >= 0
    kept = torch.from_numpy(rows[known]).to(logits.device)
    rows[known] = np.arange(len(kept))
    buffers.logits[: len(kept)] = logits[kept]
    buffers.rows.copy_(torch.from_numpy(rows), non_blocking=True)
