"""Reads the hardware counters of linear layers and attention with ncu: python bench/gpu/ncu.py JSON DEVICE

On another device than a GPU, only the calls are made that ncu would profile. Exits with 77 where ncu is not found.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

SKIPPED = 77  # as automake has it
CALLS = "--calls"  # in place of JSON: only makes the calls
ROWS, PREFIX = (1, 60), 2048
KERNELS = "regex:linear_kernel|attention_kernel"
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy", "WarpStateStats")
DURATION, BANDWIDTH = "Duration", "DRAM Throughput"
IN_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3}


def call_kernels(device_name: str) -> None:
    """Calls linear layers and attention once at each size of Llama-3.1-8B, on a CPU of a smaller model."""
    import torch

    from specengine.bench.kernels.cache_cases import attention_case
    from specengine.bench.kernels.linear_cases import linear_cases
    from specengine.bench.kernels.shapes import CPU, CUDA, LLAMA_8B, SMOLLM2

    device = torch.device(device_name)
    shapes, kernels = (LLAMA_8B, CUDA) if device.type == "cuda" else (replace(SMOLLM2, vocab=1024), CPU)
    shapes = replace(shapes, rows=ROWS, cold_bytes=1)  # ncu empties the caches itself
    with torch.inference_mode():
        cases = [attention_case(shapes, device, kernels, rows, PREFIX) for rows in ROWS]
        for case in [*cases, *linear_cases(shapes, device, kernels)]:
            for calls in case.ours.values():
                calls[0]()
            print(f"called {case.kernel}, {case.size}", flush=True)
        if device.type == "cuda":
            torch.cuda.synchronize()


def profiles(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Returns kernel, grid and metrics of every launch in ncu's CSV; lines before its header are the program's own."""
    rows = list(lines)
    header = next((number for number, line in enumerate(rows) if line.startswith('"ID"')), None)
    if header is None:
        return []
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(rows[header:]):
        if not row.get("Metric Name"):  # a rule, or the program's own line
            continue
        empty = {"kernel": row["Kernel Name"], "grid": row.get("Grid Size"), "metrics": dict[str, Any]()}
        launch = found.setdefault(row["ID"], empty)
        try:
            value: float | str = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            value = row["Metric Value"]
        launch["metrics"][row["Metric Name"]] = (value, row["Metric Unit"])
    return list(found.values())


def kernel_of(launch: dict[str, Any]) -> str:
    """Returns the name of a launch's kernel, without namespaces, template and arguments."""
    found = re.search(r"\w+_kernel\b", launch["kernel"])
    return found[0] if found else launch["kernel"]


def line_of(launch: dict[str, Any]) -> str:
    """Returns kernel, grid, duration and share of the memory's bandwidth of a launch."""
    value, unit = launch["metrics"].get(DURATION, (None, ""))
    known = isinstance(value, float) and unit in IN_MICROSECONDS
    duration = f"{value * IN_MICROSECONDS[unit]:.1f} us" if known else f"{value} {unit}"
    share = launch["metrics"].get(BANDWIDTH, ("unknown", ""))[0]
    return f"{kernel_of(launch)} {launch['grid']}: {duration}, {share} % of DRAM's bandwidth"


def summary(found: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns how many launches were profiled, and by kernel the best share of the memory's bandwidth."""
    best: dict[str, float] = {}
    for launch in found:
        share = launch["metrics"].get(BANDWIDTH, (None, ""))[0]
        if isinstance(share, float):
            best[kernel_of(launch)] = max(best.get(kernel_of(launch), 0.0), share)
    shares = [[f"{kernel}: best share of DRAM's bandwidth", share, "%"] for kernel, share in best.items()]
    return [["launches profiled", len(found), ""], *shares]


def main(path: Path, device: str) -> int:
    command = [sys.executable, __file__, CALLS, device]
    if device != "cuda":
        return subprocess.run(command).returncode
    ncu = shutil.which("ncu")
    if ncu is None:
        print("no ncu on PATH")
        return SKIPPED
    sections = [option for section in SECTIONS for option in ("--section", section)]
    options = ["--clock-control", "none", "--csv", "--page", "details", "--print-kernel-base", "demangled"]
    command = [ncu, *options, "--kernel-name", KERNELS, *sections, *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = profiles(done.stdout.splitlines())
    print(*(map(line_of, found) if found else [done.stdout]), sep="\n")
    path.write_text(json.dumps({"launches": found, "measured": summary(found)}), encoding="utf-8")
    return done.returncode or (0 if found else 1)


if __name__ == "__main__":
    if sys.argv[1] == CALLS:
        call_kernels(sys.argv[2])
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
