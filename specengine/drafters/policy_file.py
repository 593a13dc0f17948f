"""The file in which the next process finds what a draft policy has learned: costs, gains and chances."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, fields
from itertools import chain
from math import isfinite
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from specengine.draft_policy.cost_model import BITS
from specengine.draft_policy.policy import FIRST, DraftPolicy, Gain
from specengine.drafters.drafter import Drafter
from specengine.drafters.shipped import fingerprint, shipped_folder
from specengine.models.transformer import Transformer
from specengine.utils.build_info import build_info, cpu_name
from specengine.utils.measurement_cache import file_stamps, measurement_path, read_measurement, write_measurement


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
            "ops": [getattr(op, "func", op).__name__ for op in (target.ops.decoder, target.ops.linear_argmax)],
            "processes": target.tensor_parallel,
            "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu_name(),
            **{name: build[name] for name in ("version", "instruction_set", "threads")},
            "drafter": " + ".join(f"{each.name}:{each.path} {each.config}" for each in drafters),
        }
        self._path = measurement_path("policy", place)
        self._key = place | {"files": [_stamps_of(each, target) for each in drafters]}

    def read(self) -> dict[str, Any]:
        """Returns what was learned; empty where there is no file, or a damaged one."""
        return read_measurement(self._path, self._key) or {}

    def write(self, learned: dict[str, Any]) -> None:
        """Keeps what was learned, as plain JSON values."""
        write_measurement(self._path, self._key, learned)


def learned_of(policy: DraftPolicy) -> dict[str, Any]:
    """Returns what a policy has learned, as plain JSON values."""
    costs = [[*place, [*dict(points).items()]] for place, points in list(policy.costs.known.items())]
    gains = [[*key, *astuple(gain)] for key, gain in list(policy.gains.items())]
    reads = {"exponent": policy.costs.experts.exponent} if policy.costs.experts else {}
    return {"costs": costs, "gains": gains, "chances": _chances(policy), **reads}


def teach(policy: DraftPolicy, learned: dict[str, Any]) -> None:
    """Gives a policy what another process has learned, all of it or nothing."""
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        costs = {(size, prefix): {n: float(s) for n, s in points} for size, prefix, points in learned["costs"]}
        gains = {(source, size): _gain(own) for source, size, *own in learned["gains"]}
        chances = [[float(x) for x in numbers] for numbers in learned["chances"]]
        seconds = [s for points in costs.values() for s in points.values()]
        keys = [n for key in (*gains, *costs, *costs.values()) for n in key]
        exponent = float(learned["exponent"]) if policy.costs.experts else 0.0
        numbers = [exponent, *seconds, *chain(*map(astuple, gains.values())), *chain(*chances)]
        bits, sources = [n for points in costs.values() for n in points], [source for source, _ in gains]
        if not all(isinstance(n, int) for n in keys) or not all(map(isfinite, numbers)) or min(seconds, default=1) <= 0:
            return
        if not {*bits} <= {*range(BITS)} or not {*sources} <= {*range(max(1, len(policy.sources)))}:
            return
        pairs = [*zip(_chances(policy), chances, strict=True)]
        for gain in gains.values():
            gain.uses = min(gain.uses, FIRST)  # texts may have changed since
        policy.costs.known, policy.gains = costs, gains
        if policy.costs.experts:
            policy.costs.experts.exponent = exponent
        for own, known in pairs:
            own[:] = known if len(known) == len(own) else own


def _gain(numbers: Sequence[Any]) -> Gain:
    names = [field.name for field in fields(Gain)]
    return Gain(**dict(zip(names, map(float, numbers), strict=True)))


def _chances(policy: DraftPolicy) -> list[list[float]]:
    return [numbers for source in policy.sources for numbers in source.learned]


def _stamps_of(drafter: Drafter, target: Transformer) -> list[list[Any]]:
    """Returns the stamps of a drafter's local files, which a later training may replace under the same path."""
    path = drafter.path or shipped_folder(drafter.name, target)
    return file_stamps(Path(expanduser(path))) if path else []
