"""Linear layers with weights in codes on an H100, as modelled, beside what is published of Marlin.

The model knows no arithmetic outside tensor cores, and turning codes into numbers takes several instructions per
weight: the modelled times are lower bounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specengine.bench.gpu_model.constants import gpu_of
from specengine.bench.gpu_model.counts import CODED, launches
from specengine.bench.gpu_model.passes import SHAPES
from specengine.bench.gpu_model.roofline import kernel_time

PEAK = 3.35e6  # bytes per microsecond that NVIDIA gives for an H100
H100 = replace(gpu_of("h200"), name="h100", dram=PEAK * 0.8125)  # the share of the peak that the H200's constant has
ROWS = (1, 8, 16)
GOAL = 0.6
SQUARE = "8192 x 8192"
# Shares of the peak at one row of x and a square weight: vLLM's Marlin, 27 us with 4 bits and 39 us with 8.
PUBLISHED = {"int4_128_float16": 0.37, "e4m3": 0.51}


def coded_linears() -> list[dict[str, Any]]:
    """Returns bytes, modelled microseconds and share of the peak bandwidth by rows of x, for each format and shape."""
    shapes = {name: shape for name, shape in SHAPES.linears.items() if name != "head"} | {SQUARE: (8192, 8192)}
    found = []
    for place, format in enumerate(CODED):
        for name, (n, c) in shapes.items():
            times = [
                kernel_time(launch, H100)
                for rows in ROWS
                for launch in launches("coded_linear", {"rows": rows, "n": n, "c": c, "format": place})
            ]
            found.append(
                {
                    "format": format,
                    "layer": name,
                    "weight_bytes": times[0].dram_bytes,
                    "rows": list(ROWS),
                    "modelled_us": [round(time.us, 2) for time in times],
                    "modelled_share": [round(times[0].dram_bytes / time.us / PEAK, 3) for time in times],
                    "bound": [time.bound for time in times],
                    "published_marlin_share": PUBLISHED[format] if name == SQUARE else None,
                }
            )
    return found
