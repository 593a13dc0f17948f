"""Peak memory of one configuration, in a process of its own: the process of a race holds all contenders."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specengine.bench.race.run import Run

_TOKENS = 32  # of an answer; a longer one would add the same cache for every drafter


def measure_memory(runs: Sequence[Run], model: str, dtype: str) -> None:
    """Fills in `peak_memory` of runs of specengine: one process for each drafter, rule and batch size."""
    found: dict[tuple[str, str, int], int] = {}
    for run in runs:
        key = (run.drafter, run.rule, run.batch)
        if run.peer is None:
            prompts = [run.answers[0, place, 0].prompt_token_ids for place in range(run.batch)]
            found[key] = found.get(key) or peak_memory(model, dtype, run.drafter, run.rule, prompts)
            run.peak_memory = found[key]


def peak_memory(model: str, dtype: str, drafter: str, rule: str, prompts: Sequence[list[int]]) -> int:
    """Returns the peak bytes of host memory of a process that answers these prompts as one batch.

    Raises ValueError with the last line of a process that fails.
    """
    job = {"model": model, "dtype": dtype, "drafter": drafter, "rule": rule, "prompts": prompts}
    command = [sys.executable, "-m", "specengine.bench.race.memory"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"memory: {drafter}: {(done.stderr.strip() or 'the process was killed').splitlines()[-1]}")
    return int(done.stdout)


def _peak_of(job: dict[str, Any]) -> int:
    from specengine.bench.race.contenders import open_contender
    from specengine.tensor_parallel.loading import load_model
    from specengine.types import SamplingParams

    model = load_model(job["model"], device="cpu", dtype=job["dtype"])
    prompts = job["prompts"]
    engine = open_contender(model, job["drafter"], rule=job["rule"], max_batch_size=len(prompts))
    engine.generate(prompts, SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True))
    # ru_maxrss would start at the peak of the parent process.
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


if __name__ == "__main__":
    print(_peak_of(json.load(sys.stdin)))
