"""Reads the target's last hidden state before the root, and remembers nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.native import Unread
from specengine.drafters.reader import Reader
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.growth.pairs import keep_last
from specengine.ops.row_tools import stack_rows
from specengine.ops.sampling_table import TokenHistory


@dataclass(frozen=True)
class OpenedStates:
    """What a draft begins from; see Opened. hidden_states: float32 [B, hidden], of the positions before the roots.

    roots: int32 [B, 1], or the texts whose last tokens they are.
    """

    hidden_states: torch.Tensor
    roots: torch.Tensor | TokenHistory
    known: torch.Tensor
    origin: None = None

    @property
    def tokens(self) -> torch.Tensor:
        """The roots' tokens, int32 [B]."""
        return (self.roots.last if isinstance(self.roots, TokenHistory) else self.roots).flatten()


@dataclass
class LastStates:
    """The hidden states of all slots, float32 [slots, hidden].

    known: int32 [slots], 1 where there is one: a prompt of one token has none before its root.
    """

    rows: torch.Tensor
    known: torch.Tensor


class LastStateReader(Reader):
    """Keeps the last hidden state of every request, float32 [1, hidden]. rows: of a request in the largest pass."""

    reads_hidden_states = True

    def __init__(self, target: Transformer, rows: int) -> None:
        self.device_rows, self._hidden, self._device = rows, target.config.hidden_size, target.device

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        request.drafter_states[self] = hidden_states.last[-1:].clone()

    def observe(
        self, requests: Sequence[DraftRequest], committed: Sequence[list[int]], hidden_states: HiddenStates | None
    ) -> None:
        assert hidden_states is not None  # it reads them
        rows = hidden_states.rows([end - 1 for end in accumulate(map(len, committed))]).last
        for request, row in zip(requests, rows.split(1), strict=True):
            request.drafter_states[self] = row

    def can_draft(self, request: DraftRequest) -> bool:
        return self in request.drafter_states

    def open(self, requests: Sequence[DraftRequest], levels: int) -> OpenedStates:
        roots = torch.tensor([[request.tokens[-1]] for request in requests], dtype=torch.int32, device=self._device)
        return OpenedStates(self._states(requests), roots, torch.ones_like(roots[:, 0]))

    def unread(self, requests: Sequence[DraftRequest]) -> Unread:
        count = len(requests)
        return Unread([s.tokens[-1:] for s in requests], self._states(requests), range(count), (), [0] * count, ())

    def _states(self, requests: Sequence[DraftRequest]) -> torch.Tensor:
        """Returns the hidden states of requests that can be drafted for, float32 [B, hidden]."""
        return stack_rows([request.drafter_states[self] for request in requests])

    def new_device_state(self, slots: int) -> LastStates:
        rows = torch.zeros(slots, self._hidden, device=self._device)
        return LastStates(rows, torch.zeros(slots, dtype=torch.int32, device=self._device))

    def load(self, state: LastStates, slot: int, request: DraftRequest) -> None:
        if self in request.drafter_states:
            state.rows[slot] = request.drafter_states[self][0]
            state.known[slot] = 1

    def unload(self, state: LastStates, slot: int, request: DraftRequest | None) -> None:
        if request and state.known[slot]:
            request.drafter_states[self] = state.rows[slot : slot + 1].clone()
        elif request:
            request.drafter_states.pop(self, None)  # of an earlier text
        state.known[slot] = 0

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:
        state: LastStates = batch.drafter_state
        keep_last(hidden_states.normed, batch.row_start, batch.accepted, state.rows, state.known)

    def open_on_device(self, batch: DraftBatch, levels: int) -> OpenedStates:
        state: LastStates = batch.drafter_state
        return OpenedStates(state.rows[: batch.size], batch.history, state.known[: batch.size])
