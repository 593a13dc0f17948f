"""The draft policy of a drafter, what reading costs it, and the file that keeps for later what it has learned."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.policy import DraftPolicy, Source
from specengine.drafters.base import Drafter
from specengine.models.transformer import Transformer
from specengine.utils.build_info import build_info, cpu_name
from specengine.utils.measurement_cache import measurement_path, read_measurement, write_measurement


def policy_of(
    drafter: Drafter,
    target: Transformer,
    costs: CycleCosts | None,
    sources: Sequence[Source],
    parts: Sequence[Drafter] = (),
) -> DraftPolicy:
    """Makes the policy of a drafter.

    costs: given ones; None: learned, and remembered by the next process.  sources: what proposes scored trees.
    parts: other drafters whose options change what is learned.
    """
    # Captured cycles on a GPU have fixed widths, which their graphs choose.
    adaptive, memory = drafter.adaptive and not target.ops.on_device, None
    if adaptive and costs is None:
        memory = PolicyFile(target, " + ".join(f"{each.name}:{each.path} {each.config}" for each in (drafter, *parts)))
    return DraftPolicy(sources, drafter.max_nodes - 1, adaptive=adaptive, costs=costs, memory=memory)


@contextmanager
def charged(policy: DraftPolicy, number: int) -> Iterator[None]:
    """Charges a source with the seconds of the block, in which it reads a prompt."""
    began = time.perf_counter()
    yield
    policy.charge(number, time.perf_counter() - began)


class PolicyFile:
    """One file in the cache folder for each target, machine and drafter. drafter: names and options."""

    def __init__(self, target: Transformer, drafter: str) -> None:
        build = build_info()
        self._key = {
            "model": repr(target.config),
            "weights": f"{', '.join(sorted(target.formats))}: {target.weight_bytes()} bytes",
            "ops": [target.ops.decoder.__name__, target.ops.linear_argmax.__name__],
            "processes": target.tensor_parallel,
            "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu_name(),
            **{name: build[name] for name in ("version", "instruction_set", "threads")},
            "drafter": drafter,
        }
        self._path = measurement_path("policy", self._key)

    def read(self) -> dict[str, Any]:
        """Returns what was learned; empty where there is nothing."""
        return read_measurement(self._path, self._key) or {}

    def write(self, learned: dict[str, Any]) -> None:
        """Keeps what was learned, as plain JSON values."""
        write_measurement(self._path, self._key, learned)
