"""What a policy has learned, kept in the cache folder for the next process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specengine.utils.build_info import build_info, cpu_name
from specengine.utils.measurement_cache import measurement_path, read_measurement, write_measurement

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer


class Memory:
    """One file for each target, machine and drafter. drafter: name and options."""

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
