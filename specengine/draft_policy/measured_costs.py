"""Measures what a target's passes cost on this machine, and keeps the costs in a file for the next process.

Other processes can only add time to a pass, so a row count's cost is the least of a few passes. The row counts take
turns, so a slow spell falls on all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specengine import _C
from specengine.cache.kv_cache import PAGE_SIZE
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_trees.tree import TreeBatch
from specengine.utils.build_info import build_info, cpu_name
from specengine.utils.measurement_cache import measurement_path, read_measurement, write_measurement

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer

ROWS = (1, 4, 8, 2, 16, 32)  # the most telling first: a slow model is measured at these only as far as time allows
NEAR, FAR = PAGE_SIZE, 16 * PAGE_SIZE  # prefixes measured: attention makes a row dearer with every token before it
ROUNDS = 4
BUDGET_SECONDS = 1.5  # no pass is begun after this
REFRESH_SECONDS = 0.3  # of passes by a process that finds a file

_known: weakref.WeakKeyDictionary[Any, CostModel] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def adaptive_costs(adaptive: bool, target: Transformer, costs: CostModel | None = None) -> CostModel | None:
    """Returns the costs by which a drafter adapts its trees; None where it does not adapt.

    Captured cycles on a GPU have fixed widths, so drafters do not adapt there.  costs: given ones; None: the target's.
    """
    if not adaptive or target.ops.on_device:
        return None
    return costs or costs_of(target)


def costs_of(target: Transformer) -> CostModel:
    """Returns a target's costs: known already, from the file of an earlier process, or measured now (seconds at most).

    A file may come from a busy spell, so every process adds one short round to it: the least counts.
    """
    with _lock:  # engines that share a target measure it once
        if target not in _known:
            key = _key(target)
            path = _path(key)
            stored = _read(path, key)
            _known[target] = _refreshed(stored, target, path, key) if stored else _measured(target, path, key)
        return _known[target]


def measure(
    seconds_of: Callable[[int, int], float], prefixes: tuple[int, int] = (NEAR, FAR), budget: float = BUDGET_SECONDS
) -> CostModel:
    """Returns the costs of timed passes; seconds_of(rows, prefix) runs one and returns its seconds.

    No pass begins once `budget` seconds are spent. A slow model is therefore measured at fewer row counts, and the
    costs of the others are drawn from those.
    """
    near, far = prefixes
    least: dict[tuple[int, int], float] = {}
    spent = 0.0
    for case in [(rows, prefix) for prefix in dict.fromkeys(prefixes) for rows in ROWS] * ROUNDS:
        if spent >= budget:
            break
        taken = seconds_of(*case)
        spent += taken
        least[case] = min(taken, least.get(case, math.inf))
    rows = tuple(sorted(n for n, prefix in least if prefix == near))
    both = [n for n in rows if far > near and (n, far) in least]
    slopes = _line(both, [(least[n, far] - least[n, near]) / (far - near) for n in both])
    return CostModel(rows, tuple(least[n, near] for n in rows), tuple(slopes[0] + slopes[1] * n for n in rows))


def _line(rows: list[int], slopes: list[float]) -> tuple[float, float]:
    """Returns constant and slope of the line through noisy points.

    Attention reads the prefix once for all rows, and works on every row.
    """
    if len(rows) < 2:
        return (max(0.0, *slopes), 0.0) if slopes else (0.0, 0.0)
    slope, constant = np.polyfit(rows, slopes, 1)
    return max(0.0, float(constant)), max(0.0, float(slope))


def _measured(target: Transformer, path: Path | None, key: dict[str, Any]) -> CostModel:
    far = max(NEAR, min(FAR, (target.config.max_position - max(ROWS)) // PAGE_SIZE * PAGE_SIZE))
    costs = measure(_Passes(target, far), (NEAR, far))
    write_measurement(path, key, dataclasses.asdict(costs))
    return costs


def _refreshed(stored: CostModel, target: Transformer, path: Path | None, key: dict[str, Any]) -> CostModel:
    run = _Passes(target, NEAR)
    seconds = list(stored.seconds)
    spent = 0.0
    for i, rows in enumerate(stored.rows):
        if spent + seconds[i] > REFRESH_SECONDS:
            break
        taken = run(rows, NEAR)
        spent += taken
        seconds[i] = min(seconds[i], taken)
    costs = dataclasses.replace(stored, seconds=tuple(seconds))
    if costs != stored:
        write_measurement(path, key, dataclasses.asdict(costs))
    return costs


class _Passes:
    """Times passes of chains behind a prefix of zeros in a cache of their own, head included."""

    def __init__(self, target: Transformer, longest: int) -> None:
        self.target, self.cache = target, target.new_cache()
        self.pages = self.cache.allocate(2 * PAGE_SIZE)
        # Values left in fresh memory may be slow to compute with.
        self.cache.k.zero_()
        self.cache.v.zero_()
        target.ensure_positions(longest + max(ROWS))

    def __call__(self, rows: int, prefix: int) -> float:
        shown, written = self.pages  # a prefix of any length is one page, shown again and again
        batch = self.cache.batch([[shown] * (prefix // PAGE_SIZE) + [written]], [prefix])
        tree = TreeBatch.chains([[0] * rows], self.target.device)
        self._finish()
        begin = time.perf_counter()
        self.target.forward(tree, self.cache, batch, greedy=True)
        self._finish()
        return time.perf_counter() - begin

    def _finish(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def _key(target: Transformer) -> dict[str, Any]:
    """Returns all that the costs depend on, as plain JSON values."""
    device = target.device
    build = build_info()
    return {
        "model": repr(target.config),
        "weights": f"{', '.join(sorted(target.formats))}: {target.weight_bytes()} bytes",
        "ops": [target.ops.decoder.__name__, target.ops.linear_argmax.__name__],
        "processes": target.tensor_parallel,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        **{name: build[name] for name in ("version", "instruction_set", "threads")},
        "core": os.stat(_C.__file__).st_mtime_ns,  # kernels change without a new version during development
    }


def _path(key: dict[str, Any]) -> Path | None:
    """Returns one file per model and machine; the build is inside, so a new build replaces the old one's costs."""
    return measurement_path(
        "costs", [key[name] for name in ("model", "weights", "ops", "device", "instruction_set", "threads")]
    )


def _read(path: Path | None, key: dict[str, Any]) -> CostModel | None:
    """Returns the costs in a file, or None if it is missing, damaged or of another key."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if data := read_measurement(path, key):
            return CostModel(*(tuple(data[name]) for name in ("rows", "seconds", "per_position")))
    return None
