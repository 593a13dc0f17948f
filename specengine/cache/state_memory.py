"""The tensors of recurrent states: a slot for each text, and the records of the last pass."""

from __future__ import annotations

import torch

from specengine._C import DeltaStates
from specengine.ops import Ops
from specengine.utils.gated_delta_config import CONV_WIDTH, GatedDeltaConfig


class StateMemory:
    """Holds the states of all layers of gated delta rule in slots, without any at first; StatePool says whose they are.

    states: float32 [slots, layers, Hv, Dk, Dv].  conv: float32 [slots, layers, 3, C], the last inputs of convolutions.
    records: float32, of the largest pass so far.  config: of the heads that this memory has.
    """

    def __init__(self, config: GatedDeltaConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.states, self.conv = self._empty(0)
        self.records = torch.empty(0, device=device)

    @property
    def slots(self) -> int:
        """Slots that there is memory for."""
        return len(self.states)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one text's states."""
        return 4 * len(self.config.layers) * self.config.state_floats

    def resize(self, slots: int) -> None:
        """Makes room for more slots; those there are keep their states. Changes nothing where it raises MemoryError."""
        try:
            states, conv = self._empty(slots)
        except RuntimeError as error:
            size = slots * self.slot_bytes / 2**20
            raise MemoryError(f"recurrent states: no room for {slots} slots ({size:.0f} MiB)") from error
        old = self.slots
        states[:old], conv[:old] = self.states, self.conv
        self.states, self.conv = states, conv

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

    def _empty(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        layers, c = len(self.config.layers), self.config
        states = torch.empty(slots, layers, c.num_value_heads, c.key_head_dim, c.value_head_dim, device=self.device)
        return states, torch.empty(slots, layers, CONV_WIDTH - 1, c.conv_channels, device=self.device)
