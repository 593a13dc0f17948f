"""Who owns the recurrent states of hybrid models: a slot for each request, and copies for the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specengine._C import DeltaStates
from specengine.cache.free_list import FreeList
from specengine.cache.state_memory import StateMemory
from specengine.ops import Ops
from specengine.utils.host_memory import put_ints


def fixed_slots(requests: int) -> int:
    """Returns the slots of a fixed pool: each request may leave a copy for the next one with its beginning."""
    return 2 * requests


@dataclass
class StateBatch:
    """The slots of a batch.  slots: int32 [B].  final: whether the rows of its passes are parts of their texts.

    rooted: whether at least the first row of each request is, as in a pass of the target.  last: the states as the last
    pass got them, with its records.
    """

    slots: torch.Tensor
    final: bool
    rooted: bool = True
    last: DeltaStates | None = None

    def first(self, size: int) -> StateBatch:
        """Returns the view of the first `size` requests."""
        return StateBatch(self.slots[:size], self.final, self.rooted)


class StatePool:
    """Gives requests slots of a memory for the states of all layers of gated delta rule.

    A running request owns a slot; its last page, which no other request has, is the key. The prefix cache owns copies
    of states at the ends of pages, least recently used first to go.

    most_kept: copies, at most.
    requests: that a fixed pool has slots for, beside as many copies. None: an open pool, bounded by its memory alone.
    """

    def __init__(self, memory: StateMemory, requests: int | None = None) -> None:
        self.memory, self.requests, self.most_kept = memory, requests, requests or 0
        self._free = FreeList(memory.slots)
        self._of_request: dict[int, int] = {}  # last page -> slot
        self._kept: OrderedDict[int, int] = OrderedDict()  # page -> slot of the state behind it

    @property
    def slot_bytes(self) -> int:
        """Bytes of one request's states."""
        return self.memory.slot_bytes

    @property
    def slots_with_memory(self) -> int:
        """Slots that take memory on the CPU."""
        return self._free.with_memory

    @property
    def in_use(self) -> int:
        """Slots of running requests."""
        return len(self._of_request)

    @property
    def kept(self) -> int:
        """Copies in the prefix cache."""
        return len(self._kept)

    @property
    def has_room(self) -> bool:
        """Whether one more request can have a slot."""
        return len(self._free) > 0 if self.requests is None else self.in_use < self.requests

    def slot_of(self, pages: Sequence[int]) -> int:
        """Returns the slot of the owner of `pages`."""
        return self._of_request[pages[-1]]

    def record_bytes(self, rows: int) -> int:
        """Returns the bytes of the records of `rows` rows, in every layer."""
        config = self.memory.config
        return 4 * len(config.layers) * rows * config.record_floats

    def reach(self, pages: Sequence[int]) -> int:
        """Returns how many of these pages, from the first on, end with a state that is kept."""
        return max((count for count, page in enumerate(pages, start=1) if page in self._kept), default=0)

    def reserve(self) -> None:
        """Makes sure that a slot is free for the next open(). Raises MemoryError where there is no room."""
        if not len(self._free):
            raise MemoryError(f"recurrent states: all {self.memory.slots} slots are in use")

    def open(self, pages: Sequence[int], shared: int) -> None:
        """Gives the owner of `pages` a slot: the state behind its first `shared` pages, or the empty text's."""
        slot = self._of_request[pages[-1]] = self._take()
        if shared:
            self.memory.copy(self._kept[pages[shared - 1]], slot)
            self._kept.move_to_end(pages[shared - 1])
        else:
            self.memory.clear(slot)

    def close(self, pages: Sequence[int]) -> None:
        """Takes back the slot of the owner of `pages`, if it has one."""
        slot = self._of_request.pop(pages[-1], None) if pages else None
        if slot is not None:
            self._free.give_back([slot])

    def keep(self, pages: Sequence[int], count: int) -> None:
        """Copies the state of the owner of `pages`, whose text ends with its page `count` now, if there is room."""
        page = pages[count - 1]
        if page in self._kept:
            self._kept.move_to_end(page)
        most = min(self.most_kept, self.memory.slots // 2)  # a small memory must not fill up with copies
        if page in self._kept or not most:
            return
        while len(self._kept) >= most:
            self._free.give_back([self._kept.popitem(last=False)[1]])
        try:
            slot = self._take()
        except MemoryError:
            return  # a later request computes what it could have found
        self.memory.copy(self._of_request[pages[-1]], slot)
        self._kept[page] = slot

    def forget(self, page: int) -> None:
        """Drops the copy behind an evicted page."""
        if (slot := self._kept.pop(page, None)) is not None:
            self._free.give_back([slot])

    def rest(self, keep: int) -> None:
        """Gives the memory of unused slots back to the system, but for `keep` bytes."""
        self.memory.release(self._free.strip(keep // self.slot_bytes))

    def batch(self, pages: Sequence[Sequence[int]], final: bool, rooted: bool = True) -> StateBatch:
        """Makes the view of the requests that own `pages`; see StateBatch."""
        (slots,) = put_ints([np.array([self.slot_of(own) for own in pages], dtype=np.int32)], self.memory.device)
        return StateBatch(slots, final, rooted)

    def of_pass(self, batch: StateBatch, rows: int, trees: bool) -> DeltaStates:
        """Returns what a pass of `rows` rows reads and writes.  trees: whether a row has several children.

        Where a request's first row is part of its text, a pass of one row each is final.
        """
        final = batch.final or (batch.rooted and rows == len(batch.slots) and not trees)
        batch.last = self.memory.of_pass(batch.slots, rows, final)
        return batch.last

    def replay(
        self, batch: StateBatch, row_start: torch.Tensor, path: torch.Tensor, path_length: torch.Tensor, ops: Ops
    ) -> None:
        """Writes the states behind the accepted paths of the batch's last pass, unless the pass did so.

        row_start: int32 [B + 1], of the pass.  path, path_length: see ops.compact_states.
        """
        if batch.last is not None and not batch.last.final:
            self.memory.replay(batch.last, row_start, path, path_length, ops)

    def _take(self) -> int:
        self.reserve()
        (slot,) = self._free.take(1)
        return slot
