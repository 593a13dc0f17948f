"""The constants of the model: every figure that is assumed and not counted."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """Holds a GPU's sizes and rates, and the constants of launches.

    Rates are in bytes or operations per microsecond. Fitted to an H200's run (bench/results/gpu-h200.json): dram, l2,
    l2_latency, torch_kernel, library_dram and library_start. The others are published or assumed.

    multiprocessors, threads, registers, shared_bytes, blocks: of a GPU, and of one multiprocessor at once.
    l2_bytes: what L2 keeps of the last kernel's results.
    dram, l2: of the whole GPU, as the engine's own kernels reach them.
    multiprocessor_l2: from L2 to one multiprocessor, 64 bytes per clock.
    wavefronts: of one multiprocessor's shared memory, one per clock.
    products: float operations of mma.sync, about 60 % of what wgmma reaches.
    dram_latency, l2_latency: microseconds until a load's value is there, under load.
    start: microseconds between the last store of a kernel and the first load of the next, with programmatic launch.
    torch_kernel: microseconds of a small PyTorch kernel in a graph.
    library_dram, library_products: bytes and float operations that cuBLAS reaches.
    library_start: microseconds of a product by cuBLAS beside its bytes, the sum of its split columns included.
    """

    name: str = "h200"
    multiprocessors: int = 132
    threads: int = 2048
    registers: int = 65536
    shared_bytes: int = 228 * 1024
    blocks: int = 32
    l2_bytes: int = 50 << 20
    dram: float = 3.9e6
    l2: float = 4.0e6
    multiprocessor_l2: float = 64 * 1755.0
    wavefronts: float = 1755.0
    products: float = 600e6
    dram_latency: float = 0.8
    l2_latency: float = 0.6
    start: float = 1.3
    torch_kernel: float = 1.7
    library_dram: float = 4.4e6
    library_start: float = 4.3
    library_products: float = 700e6


GPUS = {"h200": Gpu()}


def gpu_of(text: str) -> Gpu:
    """Returns a GPU by name, or the first one with the constants of a JSON file in place of its own.

    Raises ValueError for another name, an unreadable file, an unknown constant or one that is no positive number.
    """
    if text in GPUS:
        return GPUS[text]
    if not text.endswith(".json"):
        raise ValueError(f"gpu-model: expected {', '.join(GPUS)} or a JSON file of constants, got {text!r}")
    base = GPUS["h200"]
    try:
        given = json.loads(Path(text).read_text(encoding="utf-8"))
        known = {key: value for key, value in given.items() if key in asdict(base)}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"gpu-model: cannot read constants from {text!r}: {error}") from None
    if unknown := given.keys() - known.keys():
        raise ValueError(f"gpu-model: {text!r} has unknown constants: {', '.join(sorted(unknown))}")
    for key, value in known.items():
        wanted = type(getattr(base, key))
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        if not (isinstance(value, str) if wanted is str else number and (wanted is float or value == int(value))):
            raise ValueError(f"gpu-model: {key}: expected a positive {wanted.__name__}, got {value!r}")
    return replace(base, **known)
