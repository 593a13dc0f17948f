"""Joins what a race says of trained drafters to what their training said: python bench/equal_data.py RACE.json OUT.json

RACE.json: of `python -m specengine.bench --drafters NAME:FOLDER,OPTIONS,.. --json RACE.json`. Each FOLDER is the
output of `specengine train`. A drafter that runs as a chain and as a tree has one line with both.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from specengine.bench.report.writing import write_json
from specengine.train.run_log import read_log


def parameters(folder: Path) -> int:
    """Returns the numbers that a drafter's file holds, scales of quantised matrices left out."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith("_scale"))


def trained(folder: Path) -> dict[str, Any]:
    """Returns size, training and best held-out report of a drafter."""
    log = read_log(folder / "training.jsonl")
    best = max((line["held_out"] for line in log if "held_out" in line), key=lambda report: report["tau"])
    return {"parameters": parameters(folder), "steps": log[-1]["step"], "tokens": log[-1]["tokens"], "held_out": best}


def main() -> None:
    race, out = map(Path, sys.argv[1:])
    data = json.loads(race.read_text(encoding="utf-8"))
    folders: dict[str, dict[str, Any]] = {}
    for row in data["runs"]:
        path = row["drafter"].partition(":")[2].partition(",")[0]
        if path and (Path(path) / "training.jsonl").exists():
            folders.setdefault(path, {"name": Path(path).name, **trained(Path(path)), "runs": []})
            folders[path]["runs"].append(row["label"])
    write_json(out, data | {"trained": list(folders.values())})


if __name__ == "__main__":
    main()
