"""Makes one result file of runs on a GPU: python bench/gpu/record.py bench/results/NAME.json COMMIT FOLDER...

FOLDER: of bench/gpu.sh. A step of a later folder replaces that of an earlier one; one that was left out replaces none.
A folder may also hold linear.json, a copy of the file in which the engine keeps the times of linear layers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def steps_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns status, seconds and measured values of every step that a folder has."""
    lines = (folder / "gpu.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    kept = ("status", "seconds", "measured")
    return {entry["step"]: {key: entry[key] for key in kept} for entry in entries if entry["status"] != "left out"}


def cycles_of(folder: Path) -> dict[str, Any]:
    """Returns the cycles of the step `cycle-kernels` without their sequences, which are long."""
    every = json.loads((folder / "gpu-results.json").read_text(encoding="utf-8"))
    cycles = every.get("cycle-kernels", {}).get("cycles", {})
    return {case: {key: value for key, value in found.items() if key != "sequence"} for case, found in cycles.items()}


def linears_of(folder: Path) -> dict[str, Any]:
    """Returns the seconds of each way to multiply, by weight and rows; none without linear.json."""
    path = folder / "linear.json"
    return json.loads(path.read_text(encoding="utf-8"))["seconds"] if path.is_file() else {}


def main(path: Path, commit: str, folders: list[Path]) -> None:
    steps: dict[str, Any] = {}
    cycles: dict[str, Any] = {}
    linears: dict[str, Any] = {}
    for folder in folders:
        steps |= steps_of(folder)
        cycles |= cycles_of(folder)
        linears |= linears_of(folder)
    data = {"gpu_steps": steps, "commit": commit, "gpu": "NVIDIA H200", "cycles": cycles, "linear_seconds": linears}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [Path(folder) for folder in sys.argv[3:]])
