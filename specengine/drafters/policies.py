"""The draft policy of a drafter, and the file in which the next process finds what it has learned."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.policy import DraftPolicy, Source
from specengine.drafters.base import Drafter
from specengine.drafters.shipped import fingerprint, shipped_folder
from specengine.models.transformer import Transformer
from specengine.utils.build_info import build_info, cpu_name
from specengine.utils.measurement_cache import file_stamps, measurement_path, read_measurement, write_measurement


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
        memory = PolicyFile(target, (drafter, *parts))
    return DraftPolicy(sources, drafter.max_nodes - 1, adaptive=adaptive, costs=costs, memory=memory)


class PolicyFile:
    """One file in the cache folder for each target, machine and drafter.

    It counts only for the weights and texts that the drafters had when it was written.
    drafters: a drafter and its parts.
    """

    def __init__(self, target: Transformer, drafters: Sequence[Drafter]) -> None:
        build = build_info()
        place = {
            "model": repr(target.config),
            "weights": f"{fingerprint(target)}; {', '.join(sorted(target.formats))}: {target.weight_bytes()} bytes",
            "ops": [target.ops.decoder.__name__, target.ops.linear_argmax.__name__],
            "processes": target.tensor_parallel,
            "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu_name(),
            **{name: build[name] for name in ("version", "instruction_set", "threads")},
            "drafter": " + ".join(f"{each.name}:{each.path} {each.config}" for each in drafters),
        }
        self._path = measurement_path("policy", place)
        self._key = place | {"files": [_stamps_of(each, target) for each in drafters]}

    def read(self) -> dict[str, Any]:
        """Returns what was learned; empty where there is nothing."""
        return read_measurement(self._path, self._key) or {}

    def write(self, learned: dict[str, Any]) -> None:
        """Keeps what was learned, as plain JSON values."""
        write_measurement(self._path, self._key, learned)


def _stamps_of(drafter: Drafter, target: Transformer) -> list[list[Any]]:
    """Returns the stamps of a drafter's local files, which a later training may replace under the same path."""
    path = drafter.path or shipped_folder(drafter.name, target)
    return file_stamps(Path(expanduser(path))) if path else []
