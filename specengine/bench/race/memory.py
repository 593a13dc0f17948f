"""Peak memory of one configuration: in a process of its own, as in the one that races them all everything counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specengine.bench.race.run import Run

_TOKENS = 32  # of an answer: the cache of a long one is the same for every drafter


def measure_memory(runs: Sequence[Run], model: str, dtype: str) -> None:
    """Fills in what ours need; a temperature needs nothing, so every drafter, rule and batch size is tried once."""
    found: dict[tuple[str, str, int], int] = {}
    for run in runs:
        key = (run.drafter, run.rule, run.batch)
        if run.peer is None:
            prompts = [run.answers[0, place, 0].prompt_token_ids for place in range(run.batch)]
            found[key] = found.get(key) or peak_memory(model, dtype, run.drafter, run.rule, prompts)
            run.peak_memory = found[key]


def peak_memory(model: str, dtype: str, drafter: str, rule: str, prompts: Sequence[list[int]]) -> int:
    """Bytes of the host's memory that a process holds at most while it answers these prompts as one batch.

    Raises ValueError with the process's last line where it fails.
    """
    asked = {"model": model, "dtype": dtype, "drafter": drafter, "rule": rule, "prompts": prompts}
    command = [sys.executable, "-m", "specengine.bench.race.memory"]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"memory: {drafter}: {(done.stderr.strip() or 'it was killed').splitlines()[-1]}")
    return int(done.stdout)


def _peak_of(asked: dict[str, Any]) -> int:
    from specengine.bench.race.contenders import open_contender
    from specengine.tensor_parallel.loading import load_model
    from specengine.types import SamplingParams

    model, prompts = load_model(asked["model"], device="cpu", dtype=asked["dtype"]), asked["prompts"]
    engine = open_contender(model, asked["drafter"], rule=asked["rule"], max_batch_size=len(prompts))
    engine.generate(prompts, SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True))
    # Not ru_maxrss: that begins with the peak of the process which started this one.
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


if __name__ == "__main__":
    print(_peak_of(json.load(sys.stdin)))
