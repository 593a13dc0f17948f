"""Engines' parts on FakeCuda: a target, a drafter, and the batches that captured cycles work on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specengine import ops as op_table
from specengine.drafters import load_drafter
from specengine.drafters.drafter import Drafter
from specengine.engine.cycle import Cycle
from specengine.engine.device.buffers import BufferSizes, DeviceBuffers
from specengine.engine.device.graph_batch import GraphBatch
from specengine.models.checkpoint import open_checkpoint
from specengine.models.transformer import Transformer, load_transformer
from specengine.ops.autotune import LinearChoices
from specengine.ops.linear import LIBRARY
from specengine.rules import parse_rule
from specengine.rules.lossless import Match
from specengine.tensor_parallel import loading
from tests.backends import use_core
from tests.fake_cuda.core import FakeCore
from tests.fake_cuda.launches import Launches
from tests.fake_cuda.mode import CUDA, FakeCuda

PAGES = 8  # of the cache
SLOTS = 4


@dataclasses.dataclass(frozen=True)
class FakeEngine:
    """What a captured cycle of one drafter needs."""

    device: FakeCuda
    cycle: Cycle
    buffers: DeviceBuffers

    @property
    def drafter(self) -> Drafter:
        return self.cycle.drafter

    def captured(self, nodes: int, size: int = SLOTS) -> Launches:
        """Runs the second cycle of a batch as it is captured, after a first one that may set things up."""
        batch = self.batch(nodes, size)
        self.cycle.run(batch)
        with self.device.captured() as launches:
            self.cycle.run(batch)
        return launches

    def catch_up(self) -> Launches | None:
        """Runs what plain cycles leave to a drafter, where they do, as if it were captured: the host may not wait."""
        backlog = getattr(self.buffers.drafter_state, "backlog", None)
        if backlog is None:
            return None
        backlog.waiting = backlog.room
        with self.device.captured() as launches:
            self.drafter.before_cycle(self.batch(nodes=1))
        return launches

    def batch(self, nodes: int, size: int = SLOTS) -> GraphBatch:
        return GraphBatch(self.buffers, size, nodes, wants=self.cycle.rule.wants)


class FakeMachine:
    """A device and the targets that were loaded there."""

    def __init__(self, device: FakeCuda, patch: pytest.MonkeyPatch) -> None:
        self.device = device
        use_core(FakeCore(device), patch)
        patch.setattr(op_table, "LinearChoices", self._choices)
        patch.setattr(loading, "resolve_device", lambda _: CUDA)  # of models that drafters load
        self._by_library = False

    def target(self, by_library: bool = False, name: str = "tiny-llama") -> Transformer:
        """Returns a tiny model.  by_library: it multiplies every product; else ours, as where nothing was measured."""
        self._by_library = by_library
        return load_transformer(open_checkpoint(f"random:{name}"), "bfloat16", CUDA, op_table.cuda_ops(CUDA))

    def _choices(self, device: torch.device, strict: bool) -> LinearChoices:
        choices = LinearChoices(torch.device("cpu"), strict=strict)  # measures nothing
        if self._by_library:
            choices.choose = lambda weight, rows: LIBRARY
        return choices

    def engine(self, target: Transformer, spec: str, rule: str = "match", slots: int = SLOTS) -> FakeEngine:
        """Makes what EngineCore makes of a drafter and a rule, but no graphs."""
        drafter, parsed = load_drafter(spec, target), parse_rule(rule)
        if drafter.hidden_state_layers:
            target = target.with_hidden_state_layers(drafter.hidden_state_layers)
        cache = target.new_cache(PAGES)
        drafter.attach(cache)
        rows = slots * drafter.max_nodes
        sizes = BufferSizes(slots, 256, drafter.spare_slots, rows, target.config.vocab_size)
        inside, drawn = drafter.drafts_in_cycle, drafter.gives_logits(parsed.wants)
        logits = drafter.room_for_logits(rows) if drawn and not inside else None
        state = drafter.new_device_state(slots) if inside else None
        weights = not isinstance(parsed, Match)
        buffers = DeviceBuffers(sizes, [2], CUDA, draft_logits=logits, weights=weights, drafter_state=state)
        return FakeEngine(self.device, Cycle(target, cache, drafter, parsed), buffers)
