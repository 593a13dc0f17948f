"""The device buffers of an engine: static tensors that captured cycles read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import CacheBatch
from specengine.cache.state_pool import StateBatch
from specengine.draft_trees.tree import DraftLogits
from specengine.engine.device.device_masks import DeviceMasks
from specengine.engine.request import Request
from specengine.ops.commit_tokens import Limits
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.verify_tree import VerifyWorkspace
from specengine.types import SamplingParams

MAX_BIASES = 1024  # entries of logit_bias of all requests of a batch


@dataclass(frozen=True)
class BufferSizes:
    """slots: requests.  positions: tokens of the longest one.  spare: cache slots behind it.  rows: of the largest
    pass."""

    slots: int
    positions: int
    spare: int
    rows: int
    vocab: int


class DeviceBuffers:
    """Room for the requests of a batch; idle slots are padding in every op. All slots are idle at first.

    eos: token ids that end a text.  draft_logits: buffers of sizes.rows rows, where the rule reads draft logits.
    weights: whether the rule works with probability weights, as all rules but `match` do.
    drafter_state: the drafter's own buffers.  adapters: whether requests may have adapters.  hybrid: whether the model
    has recurrent states.
    """

    def __init__(
        self,
        sizes: BufferSizes,
        eos: Sequence[int],
        device: torch.device,
        draft_logits: DraftLogits | None = None,
        weights: bool = False,
        drafter_state: Any = None,
        adapters: bool = False,
        hybrid: bool = False,
    ) -> None:
        slots = sizes.slots

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.size, self.device, self.vocab = slots, device, sizes.vocab
        pages = -(-(sizes.positions + sizes.spare) // PAGE_SIZE)
        chosen = torch.full_like(zeros(slots), -1) if adapters else None
        states = StateBatch(zeros(slots), final=False) if hybrid else None
        self.cache = CacheBatch(zeros(slots, pages), zeros(slots), chosen, states)
        tokens = zeros(slots, sizes.positions + sizes.spare)
        self.history = TokenHistory(tokens, torch.ones_like(zeros(slots)), zeros(slots))
        eos_ids = torch.tensor(sorted(eos), dtype=torch.int32, device=device)
        self.limits = Limits(eos_ids, ignores_eos=zeros(slots), final_length=zeros(slots), active=zeros(slots))
        idle = SamplingTable.of([SamplingParams()] * slots, [0] * slots).to(device)
        self._columns = {f.name: getattr(idle, f.name) for f in fields(SamplingTable) if "bias_" not in f.name}
        self.params = SamplingTable(
            **self._columns,
            bias_start=zeros(slots + 1),
            bias_tokens=zeros(MAX_BIASES),
            bias_values=zeros(MAX_BIASES, dtype=torch.float32),
        )
        self._biased = False
        self.workspace = VerifyWorkspace.empty(slots, sizes.vocab, rows=sizes.rows, device=device, weights=weights)
        self.masks = DeviceMasks(sizes.rows, sizes.vocab, device)
        self.draft_logits, self.drafter_state = draft_logits, drafter_state

    def check_biases(self, params: SamplingParams) -> None:
        """Raises ValueError where the buffers can never hold the biases of a request."""
        count = len(params.logit_bias or {})
        if count > MAX_BIASES:
            raise ValueError(f"logit_bias: has {count} entries, at most {MAX_BIASES} fit")

    def has_room(self, requests: Sequence[Request]) -> bool:
        """Returns whether the biases of all requests of a batch fit together."""
        return sum(len(r.params.logit_bias or {}) for r in requests) <= MAX_BIASES

    def load(self, slot: int, request: Request, state_slot: int | None = None) -> None:
        """Copies a request into a slot; load_biases() has to follow.  state_slot: of its recurrent states."""
        for name, column in self._columns.items():
            column[slot] = request.seed if name == "seed" else getattr(request.params, name)
        for row, values in ((self.history.tokens[slot], request.tokens), (self.cache.block_table[slot], request.pages)):
            row[: len(values)].copy_(torch.from_numpy(np.array(values, dtype=np.int32)), non_blocking=True)
        self.history.length[slot] = len(request.tokens)
        self.history.prompt_length[slot] = request.prompt_length
        self.cache.lengths[slot] = len(request.tokens) - 1
        if self.cache.adapters is not None:
            self.cache.adapters[slot] = request.adapter_index
        if self.cache.states is not None and state_slot is not None:
            self.cache.states.slots[slot] = state_slot
        self.limits.ignores_eos[slot] = int(request.params.ignore_eos)
        self.limits.final_length[slot] = request.prompt_length + request.limit
        self.limits.active[slot] = int(request.finish_reason is None)

    def clear(self, slot: int) -> None:
        """Makes a slot idle; attention then reads no prefix for it."""
        self.limits.active[slot] = 0
        self.cache.lengths[slot] = 0
        if self.cache.adapters is not None:
            self.cache.adapters[slot] = -1
        self.history.length[slot] = 1

    def load_biases(self, params: Sequence[SamplingParams | None]) -> None:
        """Copies the biases of all slots, if there are any; None: of an idle slot."""
        biased = any(each and each.logit_bias for each in params)
        if biased or self._biased:
            table = SamplingTable.of([each or SamplingParams() for each in params], [0] * len(params))
            for name in ("bias_start", "bias_tokens", "bias_values"):
                values = getattr(table, name)
                getattr(self.params, name)[: len(values)].copy_(values, non_blocking=True)
        self._biased = biased
