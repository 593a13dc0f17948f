"""Which request lies in which slot of the device buffers; a change of the batch touches only the slots that change."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.cache.state_pool import StatePool
from specengine.drafters.drafter import Drafter
from specengine.engine.device.buffers import DeviceBuffers
from specengine.engine.request import Request


class DeviceSlots:
    """Moves requests between the host and their slots, while no cycle is under way."""

    def __init__(self, buffers: DeviceBuffers, drafter: Drafter, states: StatePool | None = None) -> None:
        self._buffers, self._drafter, self._states = buffers, drafter, states
        self._residents: list[Request | None] = [None] * buffers.size

    def place(self, requests: Sequence[Request], room: int) -> list[int]:
        """Gives the requests, and no others, slots among the first `room`; returns the slot of each.

        Who lies there already stays. The host has committed what the slots of the others hold, or will before they are
        placed again.
        """
        wanted = {id(request) for request in requests}
        for slot, resident in enumerate(self._residents):
            if resident and (slot >= room or id(resident) not in wanted):
                self._empty(slot, resident)
        places = {id(resident): slot for slot, resident in enumerate(self._residents) if resident}
        free = [slot for slot, resident in enumerate(self._residents) if not resident]
        joining = [request for request in requests if id(request) not in places]
        for slot, request in zip(free, joining, strict=False):
            self._fill(slot, request)
            places[id(request)] = slot
        self._buffers.load_biases([resident.params if resident else None for resident in self._residents])
        return [places[id(request)] for request in requests]

    def take_out(self, requests: Sequence[Request]) -> None:
        """Moves those of the requests that have slots back to the host."""
        leaving = {id(request) for request in requests}
        for slot, resident in enumerate(self._residents):
            if resident and id(resident) in leaving:
                self._empty(slot, resident)

    def _fill(self, slot: int, request: Request) -> None:
        self._residents[slot] = request  # before it is whole: where loading fails, the slot is emptied later
        if self._buffers.drafter_state is not None:
            self._drafter.load(self._buffers.drafter_state, slot, request)
        self._buffers.load(slot, request, self._states.slot_of(request.pages) if self._states else None)

    def _empty(self, slot: int, request: Request) -> None:
        self._residents[slot] = None
        self._buffers.clear(slot)
        if self._buffers.drafter_state is not None:
            goes_on = bool(request.pages)  # without pages the request was released
            self._drafter.unload(self._buffers.drafter_state, slot, request if goes_on else None)
