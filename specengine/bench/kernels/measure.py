"""`python -m specengine.bench --kernels`: times every kernel beside PyTorch and against its least memory traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from specengine.bench.kernels.case import Case
from specengine.bench.kernels.cases import cases
from specengine.bench.kernels.shapes import CPU, CUDA, LLAMA_8B, SMOLLM2, Kernels, Shapes
from specengine.bench.kernels.timers import Timer, medians, timer_for

ROUNDS = 15
LEAST_CALLS = 24  # calls between two readings of the clock


@torch.inference_mode()
def time_kernels(
    device: torch.device,
    speed: float,
    shapes: Shapes | None = None,
    kernels: Kernels | None = None,
    *,
    timer: Timer | None = None,
    rounds: int = ROUNDS,
    least_calls: int = LEAST_CALLS,
) -> list[dict[str, Any]]:
    """Returns one entry per case. speed: bytes per second of the device's memory.

    us, torch_us: median microseconds of a call, of the fastest variant and of PyTorch.  speedup: torch_us over us.
    floor_bytes: least bytes read and written.  gb_per_second, bandwidth_fraction: by these bytes and us.
    error: relative norm of the difference to PyTorch's result, or the share of unequal integers.
    """
    on_cuda = device.type == "cuda"
    timer = timer or timer_for(device)
    shapes = shapes or (LLAMA_8B if on_cuda else SMOLLM2)
    kernels = kernels or (CUDA if on_cuda else CPU)
    return [_time(case, speed, timer, rounds, least_calls) for case in cases(shapes, device, kernels)]


def _time(case: Case, speed: float, timer: Timer, rounds: int, least_calls: int) -> dict[str, Any]:
    errors = {name: _error(calls[0](), case.torch[0]()) for name, calls in case.ours.items()}
    every = [*case.ours.values(), case.torch]
    timers = [timer(calls * -(-least_calls // len(calls))) for calls in every]
    *ours, reference = medians(timers, rounds)
    seconds, variant = min(zip(ours, case.ours, strict=True))
    return {
        "kernel": case.kernel,
        "size": case.size,
        "variant": variant or None,
        "us": 1e6 * seconds,
        "torch_us": 1e6 * reference,
        "speedup": reference / seconds,
        "floor_bytes": case.nbytes,
        "gb_per_second": case.nbytes / seconds / 1e9,
        "bandwidth_fraction": case.nbytes / seconds / speed,
        "error": errors[variant],
        "us_by_variant": {name: 1e6 * each for name, each in zip(case.ours, ours, strict=True) if name},
    }


def _error(ours: object, reference: object) -> float | None:
    if not isinstance(ours, torch.Tensor) or not isinstance(reference, torch.Tensor):
        return None
    if not ours.is_floating_point():
        return (ours != reference).double().mean().item()
    ours, reference = ours.double(), reference.double()
    return ((ours - reference).norm() / reference.norm()).item()


def kernels_table(rows: Sequence[dict[str, Any]], speed: float) -> Table:
    """Returns the entries of `time_kernels` as a table."""
    caption = (
        "us: median of calls over buffers that are together larger than a cache. floor: least bytes read and written. "
        f"of memory: share of the {speed / 1e9:.0f} GB/s of a plain copy (on a CPU a plain sum). "
        "error: difference to PyTorch's result."
    )
    out = Table(title="kernels", title_justify="left", caption=caption, caption_justify="left")
    out.add_column("kernel", no_wrap=True)
    out.add_column("size", no_wrap=True)
    for name in ("us", "PyTorch us", "speedup", "floor, MB", "GB/s", "of memory", "error"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(
            row["kernel"],
            row["size"],
            f"{row['us']:.1f}",
            f"{row['torch_us']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['floor_bytes'] / 1e6:.2f}",
            f"{row['gb_per_second']:.0f}",
            f"{row['bandwidth_fraction']:.0%}",
            "" if row["error"] is None else f"{row['error']:.1e}",
        )
    return out
