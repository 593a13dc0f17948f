"""Chooses how CUDA multiplies by a weight: by the kernel's variant or torch's product that measured fastest.

Each shape is measured once for a few numbers of rows, and a file keeps the results for the next process. Choosing only
looks up, so it may happen while a CUDA graph is captured; measuring may not.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from specengine import _C
from specengine.ops.linear import LIBRARY, multiply
from specengine.ops.weight import Projection
from specengine.utils.build_info import build_info
from specengine.utils.cuda_graphs import capture_graph
from specengine.utils.measurement_cache import measurement_path, read_measurement, write_measurement

ROWS = (1, 8, 16, 32, 64)  # measured; other numbers of rows use the next larger one
DEFAULT = 0
LIBRARY_NAME = "library"
VARIANTS = {f"{rows}x{warps}": i for i, (rows, warps) in enumerate(_C.LINEAR_VARIANTS, 1)}  # names in files
WAYS = {**VARIANTS, LIBRARY_NAME: LIBRARY}
# Strict products over fewer columns use variants of 8 warps, others variants of 16. On an H200, with 14,336 columns and
# 8 rows, the fastest variant of 16 warps is 1.37x faster than the fastest of 8. With 4,096 columns and one row, the
# fastest of 8 warps is 3 % slower than the fastest of all.
MANY_COLUMNS = 8192
ROUNDS = 5
# Seconds that a product by our kernel saves where the op behind it is its end. An H200's small kernels take 2.4 to 3.3
# us; the model gives a norm or a rotation as an end 2 us of them. No GPU has judged it.
FUSION_SAVES = 1e-6

Seconds = Callable[[int, int], float]  # the time of a product, by rows and way
Timer = Callable[[torch.Tensor], Seconds]  # makes one for a weight


class LinearChoices:
    """The choices of one device.

    strict: a row's bits depend neither on the number of rows nor on how many rows the weight has. The choices are
    variants with as many warps, which add in the same order; how many follows from the number of columns alone.
    timer: measures products by a weight. Without one (the default without CUDA) every choice is the default variant.
    """

    def __init__(self, device: torch.device, *, strict: bool = False, timer: Timer | None = None) -> None:
        self.strict = strict
        self._timer = timer or (_CudaTimer if device.type == "cuda" else None)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._path = measurement_path("linear", name)
        core = os.stat(_C.__file__).st_mtime_ns  # a development build changes kernels without a new version
        self._key = {"device": name, "version": build_info()["version"], "torch": torch.__version__, "core": core}
        self._lock = threading.Lock()
        self._seconds: dict[str, dict[str, dict[str, float]]] = {}  # by weight, rows and way
        self._chosen: dict[tuple[str, int], int] = {}
        self._fused: dict[tuple[str, int], int] = {}
        self._add(_checked(read_measurement(self._path, self._key)))

    def choose(self, weight: torch.Tensor, rows: int) -> int:
        """The way to multiply `rows` rows by this weight [N, C]: a variant of the kernel, or LIBRARY."""
        if rows > ROWS[-1] and not self.strict:
            return LIBRARY
        return self._chosen.get((_name_of(weight), _measured_rows(rows)), self._unmeasured(weight))

    def choose_fused(self, weight: torch.Tensor, rows: int) -> int:
        """As choose, where our kernel also does what the op behind does: the library must be faster by FUSION_SAVES."""
        return self._fused.get((_name_of(weight), _measured_rows(rows)), self._unmeasured(weight))

    def _unmeasured(self, weight: torch.Tensor) -> int:
        return VARIANTS[_strict_ways(weight.shape[1])[0]] if self.strict else DEFAULT

    def tune(self, layer: Projection, rows: Iterable[int] = ROWS) -> None:
        """Measures products with these numbers of rows that are not known yet; does nothing without a timer."""
        if self._timer is None:
            return
        wanted = dict.fromkeys(map(_measured_rows, rows))
        for weight in layer.weights:
            if weight.data.dtype == torch.uint8:
                continue  # codes have one kernel
            with self._lock:
                known = self._seconds.get(_name_of(weight.data), {})
                if missing := [n for n in wanted if str(n) not in known]:
                    seconds = self._timer(weight.data)
                    self._add({_name_of(weight.data): {str(n): _seconds_of_ways(seconds, n) for n in missing}})
                    write_measurement(self._path, self._key, {"seconds": self._seconds})

    def report(self) -> dict[str, Any]:
        """The choices on this device, as plain JSON values: by weight and number of rows."""
        names = {way: name for name, way in WAYS.items()}
        chosen: dict[str, dict[str, str]] = {}
        for (weight, rows), way in sorted(self._chosen.items()):
            chosen.setdefault(weight, {})[str(rows)] = names.get(way, "default")
        return {"device": self._key["device"], "strict": self.strict, "chosen": chosen}

    def _add(self, seconds: dict[str, dict[str, dict[str, float]]]) -> None:
        for weight, by_rows in seconds.items():
            known = self._seconds.setdefault(weight, {})
            known.update(by_rows)
            ways = _strict_ways(int(weight.rpartition("x")[2])) if self.strict else list(WAYS)
            for rows in ROWS:
                if measured := known.get(str(rows)):
                    self._chosen[weight, rows] = WAYS[_fastest(measured, ways)]
                    fused = {**measured, LIBRARY_NAME: measured[LIBRARY_NAME] + FUSION_SAVES}
                    self._fused[weight, rows] = WAYS[_fastest(fused, ways)]


def _seconds_of_ways(seconds: Seconds, rows: int) -> dict[str, float]:
    return {name: seconds(rows, way) for name, way in WAYS.items()}


def _fastest(seconds: dict[str, float], ways: Iterable[str]) -> str:
    return min(ways, key=seconds.__getitem__)


def _strict_ways(columns: int) -> list[str]:
    """Returns the variants for strict products over so many columns. All have the same number of warps."""
    warps = "16" if columns >= MANY_COLUMNS else "8"
    return [name for name in VARIANTS if name.partition("x")[2] == warps]


def _name_of(weight: torch.Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} {weight.shape[0]}x{weight.shape[1]}"


def _measured_rows(rows: int) -> int:
    return next((n for n in ROWS if rows <= n), ROWS[-1])


def _checked(data: dict[str, Any] | None) -> dict[str, dict[str, dict[str, float]]]:
    """The seconds in a file, if they have the form that this module writes; else none."""
    seconds: Any = data.get("seconds") if data else None
    try:
        tables = [table for by_rows in seconds.values() for table in by_rows.values()]
        good = all(table.keys() == WAYS.keys() and all(math.isfinite(s) for s in table.values()) for table in tables)
    except (AttributeError, TypeError):
        good = False
    return seconds if good else {}


class _CudaTimer:
    """Times products by CUDA events around a graph of them, each by another copy of the weight.

    If memory allows, the copies exceed the level-2 cache. The graph keeps the host's time out of the result.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        device = weight.device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        free, _ = torch.cuda.mem_get_info(device)
        size = max(1, weight.nbytes)
        count = max(1, min(-(-3 * cache // size), free // 4 // size, 64))
        self.weights = [weight, *(weight.clone() for _ in range(count - 1))]

    def __call__(self, rows: int, way: int) -> float:
        weight = self.weights[0]
        x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
        out = torch.empty(rows, weight.shape[0], device=weight.device)
        products = self.weights * -(-8 // len(self.weights))

        def multiply_all() -> None:
            for copy in products:
                multiply(x, copy, None, out, 0, way)

        with torch.cuda.device(weight.device):
            graph = capture_graph(
                multiply_all,
                weight.device,
                warm_up=lambda: multiply(x, weight, None, out, 0, way),
            )
            return min(self._replayed(graph) for _ in range(ROUNDS)) / len(products)

    @staticmethod
    def _replayed(graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
