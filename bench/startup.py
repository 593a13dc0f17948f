"""Measures how long engines take to start: python bench/startup.py [MODEL[@DTYPE]...].

A start is a process that has imported torch, from the import of specengine to the first token. The first start of a
model packs its weights, the next ones read those that the cache folder keeps. The cache folder is a temporary one. With
no arguments: the embedded model, it as a folder of safetensors in int4, and random weights in int4.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from specengine.bench.machine import machine
from specengine.hub.catalog import EMBEDDED
from specengine.hub.huggingface import resolve_model
from specengine.quantise.quantise import quantise

START = """
import json, resource, sys, time
import torch

def spent():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, time.perf_counter()

times = [spent()]
from specengine import Engine, SamplingParams
times.append(spent())
engine = Engine(sys.argv[1], dtype=sys.argv[2])
times.append(spent())
engine.generate([1], SamplingParams(max_new_tokens=1))
times.append(spent())
print(json.dumps([[b - a for a, b in zip(one, two)] for one, two in zip(times, times[1:])]))
"""
PARTS = ("import", "engine", "first token")
WARM = 3  # starts, of which the table has the median


def start(model: str, dtype: str, cache: Path) -> list[list[float]]:
    """Returns seconds of CPU and of the clock of each part of one start."""
    command = [sys.executable, "-c", START, model, dtype]
    done = subprocess.run(
        command, env=os.environ | {"SPECENGINE_CACHE": str(cache)}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, which: str, starts: list[list[list[float]]]) -> str:
    """Returns a line of the table: medians of CPU s / wall s of each part."""
    medians = [[statistics.median(one[part][kind] for one in starts) for kind in (0, 1)] for part in range(len(PARTS))]
    return f"| {name} | {which} | " + " | ".join(f"{cpu:.2f} / {wall:.2f}" for cpu, wall in medians) + " |"


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        models = sys.argv[1:]
        if not models:
            made = Path(folder) / "smollm2-135m-int4-g128"
            quantise("smollm2-135m", "int4-g128", made)
            models = ["smollm2-135m", str(made), "random:qwen2.5-0.5b@int4"]
        here = machine()
        print(
            f"{here['cpu']}, {here['cores']} cores: CPU s / wall s after `import torch`, warm: the median of {WARM}\n"
        )
        print(f"| model | start | {' | '.join(PARTS)} |\n|---|---|{'---|' * len(PARTS)}")
        for number, model in enumerate(models):
            path, _, dtype = model.partition("@")
            cache = Path(folder) / f"cache{number}"
            cache.mkdir()
            if path in EMBEDDED:
                (cache / path).symlink_to(Path(resolve_model(path)).parents[1])
            starts = [start(path, dtype or "auto", cache) for _ in range(1 + WARM)]
            name = Path(path).name + (f", {dtype}" if dtype else "")
            print(row(name, "first", starts[:1]))
            print(row(name, "next", starts[1:]), flush=True)


if __name__ == "__main__":
    main()
