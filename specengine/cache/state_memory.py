"""The tensors of recurrent states: a slot for each text, and the records of the last pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine._C import DeltaStates
from specengine.ops import Ops
from specengine.utils.gated_delta_config import CONV_WIDTH, GatedDeltaConfig
from specengine.utils.host_memory import is_host
from specengine.utils.reserved_memory import ReservedArray, reservable


class StateMemory:
    """Holds the states of all layers of gated delta rule in slots; StatePool says whose they are.

    states: float32 [slots, layers, Hv, Dk, Dv].  conv: float32 [slots, layers, 3, C], the last inputs of convolutions.
    records: float32, of the largest pass so far.  config: of the heads that this memory has.
    slots: None, on the CPU: as many as address space is reserved for. There only written slots take memory.
    Raises MemoryError where there is no room.
    """

    def __init__(self, config: GatedDeltaConfig, device: torch.device, slots: int | None = None) -> None:
        self.config, self.device = config, device
        self._arrays: tuple[ReservedArray, ...] = ()
        if slots is None:
            if not is_host(device):
                raise ValueError(f"slots: expected a number on {device}, where states take their memory at once")
            slots = max(1, reservable() // (4 * len(config.layers) * config.state_floats))
        self._make(slots)
        self.records = torch.empty(0, device=device)

    @property
    def slots(self) -> int:
        """Slots that there is memory for."""
        return len(self.states)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one text's states."""
        return 4 * len(self.config.layers) * self.config.state_floats

    def release(self, slots: Sequence[int]) -> None:
        """Gives the memory of slots back to the system, on the CPU."""
        for slot in slots:
            for array in self._arrays:
                array.release(array.tensor[slot])

    def clear(self, slot: int) -> None:
        """Writes the state of the empty text."""
        self.states[slot] = 0
        self.conv[slot] = 0

    def copy(self, slot: int, to: int) -> None:
        """Copies one slot's state to another."""
        self.states[to] = self.states[slot]
        self.conv[to] = self.conv[slot]

    def of_pass(self, slots: torch.Tensor, rows: int, final: bool) -> DeltaStates:
        """Returns what a pass of `rows` rows reads and writes.  slots: int32 [B].  final: see ops.gated_delta."""
        layers = 1 if final else len(self.config.layers)
        floats = layers * rows * self.config.record_floats
        if len(self.records) < floats:
            self.records = torch.empty(floats, device=self.device)
        records = self.records[:floats].view(layers, rows, self.config.record_floats)
        return DeltaStates(self.states, self.conv, slots, records, final)

    def replay(
        self, states: DeltaStates, row_start: torch.Tensor, path: torch.Tensor, path_length: torch.Tensor, ops: Ops
    ) -> None:
        """Writes the states behind the accepted paths of a pass, which got `states`; see ops.compact_states."""
        ops.compact_states(states, row_start, path, path_length, self.config.num_key_heads, self.config.tiled)

    def _make(self, slots: int) -> None:
        layers, c = len(self.config.layers), self.config
        shapes = (
            (slots, layers, c.num_value_heads, c.key_head_dim, c.value_head_dim),
            (slots, layers, CONV_WIDTH - 1, c.conv_channels),
        )
        if is_host(self.device):
            self._arrays = tuple(ReservedArray("recurrent states", shape, torch.float32) for shape in shapes)
            self.states, self.conv = (array.tensor for array in self._arrays)
        else:
            self.states, self.conv = (torch.empty(shape, device=self.device) for shape in shapes)
