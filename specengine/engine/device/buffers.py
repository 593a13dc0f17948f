"""The device buffers of an engine: static tensors that captured cycles read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.tree import DraftLogits
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
    """Room for the requests of a batch; idle slots are padding in every op.

    eos: token ids that end a text.  draft_logits: buffers of sizes.rows rows, where the rule reads draft logits.
    weights: whether the rule works with probability weights, as all rules but `match` do.
    drafter_state: the drafter's own buffers.
    """

    def __init__(
        self,
        sizes: BufferSizes,
        eos: Sequence[int],
        device: torch.device,
        draft_logits: DraftLogits | None = None,
        weights: bool = False,
        drafter_state: Any = None,
    ) -> None:
        slots = sizes.slots

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.size, self.device, self.vocab = slots, device, sizes.vocab
        pages = -(-(sizes.positions + sizes.spare) // PAGE_SIZE)
        self.cache = CacheBatch(zeros(slots, pages), zeros(slots))
        tokens = zeros(slots, sizes.positions + sizes.spare)
        self.history = TokenHistory(tokens, torch.ones_like(zeros(slots)), zeros(slots))
        eos_ids = torch.tensor(sorted(eos), dtype=torch.int32, device=device)
        self.limits = Limits(eos_ids, ignores_eos=zeros(slots), final_length=zeros(slots), active=zeros(slots))
        idle = SamplingTable.of([SamplingParams()] * slots, [0] * slots).to(device)
        self.params = SamplingTable(
            **{f.name: getattr(idle, f.name) for f in fields(SamplingTable) if "bias_" not in f.name},
            bias_start=zeros(slots + 1),
            bias_tokens=zeros(MAX_BIASES),
            bias_values=zeros(MAX_BIASES, dtype=torch.float32),
        )
        self.workspace = VerifyWorkspace.empty(slots, sizes.vocab, rows=sizes.rows, device=device, weights=weights)
        self.draft_logits, self.drafter_state = draft_logits, drafter_state

    def check_biases(self, params: SamplingParams) -> None:
        """Raises ValueError where the buffers can never hold the biases of a request."""
        count = len(params.logit_bias or {})
        if count > MAX_BIASES:
            raise ValueError(f"logit_bias: has {count} entries, at most {MAX_BIASES} fit")

    def has_room(self, requests: Sequence[Request]) -> bool:
        """Returns whether the biases of all requests of a batch fit together."""
        return sum(len(r.params.logit_bias or {}) for r in requests) <= MAX_BIASES

    def load(self, requests: Sequence[Request]) -> None:
        """Copies the requests into the first slots; the other slots become idle."""
        count = len(requests)

        def put(target: torch.Tensor, values: Sequence, rows: slice = slice(0, count)) -> None:
            if len(values):
                host = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))
                target[rows].copy_(host, non_blocking=True)

        self.limits.active.zero_()
        table = SamplingTable.of([r.params for r in requests], [r.seed for r in requests])
        for name in (f.name for f in fields(SamplingTable)):
            values = getattr(table, name)
            put(getattr(self.params, name), values, slice(0, len(values)))
        self.params.bias_start[count + 1 :].copy_(self.params.bias_start[count])
        for slot, request in enumerate(requests):
            put(self.history.tokens[slot], request.tokens, slice(0, len(request.tokens)))
            put(self.cache.block_table[slot], request.pages, slice(0, len(request.pages)))
        put(self.history.length, [len(r.tokens) for r in requests])
        put(self.history.prompt_length, [r.prompt_length for r in requests])
        put(self.cache.lengths, [len(r.tokens) - 1 for r in requests])
        put(self.limits.ignores_eos, [int(r.params.ignore_eos) for r in requests])
        put(self.limits.final_length, [r.prompt_length + r.limit for r in requests])
        put(self.limits.active, [int(r.finish_reason is None) for r in requests])
