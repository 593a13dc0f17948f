"""What a target pass costs by its number of rows, measured where it runs and kept for the next time.

Only the ratios matter: they decide how many drafted rows pay. Other processes can only add time to a pass, so a row
count's cost is the least of a few passes, and the row counts take turns, so that a slow spell falls on all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specengine import _C
from specengine.cache.kv_cache import PAGE_SIZE
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


@dataclass(frozen=True)
class CostModel:
    """Seconds of a pass: linear between the measured row counts and beyond the last, never less for more rows.

    rows: ascending from 1.  seconds: of a pass of so many rows behind a short prefix.
    per_position: seconds added by each token of the prefix (empty: none).
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_position: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        extra = self.per_position or (0.0,) * len(self.rows)
        if not self.rows or self.rows[0] != 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows: expected ascending numbers from 1, got {self.rows!r}")
        for name, values, least in (("seconds", self.seconds, 1e-12), ("per_position", extra, 0.0)):
            if len(values) != len(self.rows) or not all(math.isfinite(v) and v >= least for v in values):
                raise ValueError(f"{name}: expected {len(self.rows)} finite numbers from {least}, got {values!r}")

    @cached_property
    def _rows(self) -> list[int]:
        return [*self.rows, 2 * self.rows[-1]]

    @cached_property
    def _seconds(self) -> list[float]:
        return _extended(self.rows, self.seconds)

    @cached_property
    def _per_position(self) -> list[float]:
        return _extended(self.rows, self.per_position or (0.0,) * len(self.rows))

    def __call__(self, rows: int, prefix: float = 0.0) -> float:
        """Seconds of a pass with `rows` rows behind `prefix` tokens."""
        right = min(max(1, bisect_left(self._rows, rows)), len(self._rows) - 1)  # the last line goes on
        low, high = (self._seconds[i] + prefix * self._per_position[i] for i in (right - 1, right))
        begin, end = self._rows[right - 1], self._rows[right]
        return low + (high - low) * (rows - begin) / (end - begin)


def _extended(rows: tuple[int, ...], values: tuple[float, ...]) -> list[float]:
    """The running maximum of the values, and one more point at twice the last row count.

    A measurement cut short may have missed where rows begin to cost, so a row beyond it costs at least half of what
    the measured ones cost on average.
    """
    curve = list(accumulate(values, max))
    slope = 0.5 * curve[-1] / rows[-1]
    if len(rows) > 1:
        slope = max(slope, (curve[-1] - curve[-2]) / (rows[-1] - rows[-2]))
    return [*curve, curve[-1] + slope * rows[-1]]


def measure(
    seconds_of: Callable[[int, int], float], prefixes: tuple[int, int] = (NEAR, FAR), budget: float = BUDGET_SECONDS
) -> CostModel:
    """The costs seen by timing passes; seconds_of(rows, prefix) runs one and says how long it took.

    No pass is begun once `budget` seconds are spent, so a slow model is measured at fewer row counts and the others
    are drawn from those.
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
    """Constant and slope of the line through noisy points: attention reads the prefix once, and works on every row."""
    if len(rows) < 2:
        return (max(0.0, *slopes), 0.0) if slopes else (0.0, 0.0)
    slope, constant = np.polyfit(rows, slopes, 1)
    return max(0.0, float(constant)), max(0.0, float(slope))


_known: weakref.WeakKeyDictionary[Any, CostModel] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def costs_of(target: Transformer) -> CostModel:
    """A target's costs: known already, from the file of an earlier process, or measured now (seconds at most).

    A file may come from a busy spell, so every process adds one short round to it: the least counts.
    """
    with _lock:  # engines that share a target measure it once
        if target not in _known:
            key = _key(target)
            path = _path(key)
            kept = _read(path, key)
            _known[target] = _refreshed(kept, target, path, key) if kept else _measured(target, path, key)
        return _known[target]


def _measured(target: Transformer, path: Path | None, key: dict[str, Any]) -> CostModel:
    far = max(NEAR, min(FAR, (target.config.max_position - max(ROWS)) // PAGE_SIZE * PAGE_SIZE))
    costs = measure(_Passes(target, far), (NEAR, far))
    write_measurement(path, key, dataclasses.asdict(costs))
    return costs


def _refreshed(kept: CostModel, target: Transformer, path: Path | None, key: dict[str, Any]) -> CostModel:
    run, seconds, spent = _Passes(target, NEAR), list(kept.seconds), 0.0
    for i, rows in enumerate(kept.rows):
        if spent + seconds[i] > REFRESH_SECONDS:
            break
        taken = run(rows, NEAR)
        spent += taken
        seconds[i] = min(seconds[i], taken)
    costs = dataclasses.replace(kept, seconds=tuple(seconds))
    if costs != kept:
        write_measurement(path, key, dataclasses.asdict(costs))
    return costs


class _Passes:
    """Times passes of chains behind a prefix of zeros in a cache of their own, head included."""

    def __init__(self, target: Transformer, longest: int) -> None:
        self.target, self.cache = target, target.new_cache()
        self.pages = self.cache.allocate(2 * PAGE_SIZE)
        # What fresh memory holds may be slow to compute with.
        self.cache.k.zero_(), self.cache.v.zero_()
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
    """All that the costs depend on, as plain JSON values."""
    device = target.device
    build = build_info()
    return {
        "model": repr(target.config),
        "weights": f"{', '.join(sorted(target.formats))}: {target.weight_bytes()} bytes",
        "ops": [target.ops.decoder.__name__, target.ops.linear_argmax.__name__],
        "processes": target.tensor_parallel,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        **{name: build[name] for name in ("version", "instruction_set", "threads")},
        "core": os.stat(_C.__file__).st_mtime_ns,  # kernels change without a new version while one works on them
    }


def _path(key: dict[str, Any]) -> Path | None:
    """One file per model and place; the build is inside, so a new one replaces the old one's costs."""
    return measurement_path(
        "costs", [key[name] for name in ("model", "weights", "ops", "device", "instruction_set", "threads")]
    )


def _read(path: Path | None, key: dict[str, Any]) -> CostModel | None:
    """The costs in a file, or None if it is missing, damaged or about something else."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if data := read_measurement(path, key):
            return CostModel(*(tuple(data[name]) for name in ("rows", "seconds", "per_position")))
    return None
