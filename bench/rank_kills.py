"""Kills ranks of a tensor-parallel engine at random points: python bench/rank_kills.py ROUNDS OUT.json [MODEL]

Signal 9 comes alternately while the engine generates and while it loads. Each time the caller must get RankFailed
within seconds, the next request must get it too, and no process may be left. Any other outcome ends the run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specengine import Engine, SamplingParams
from specengine.bench.machine import commit, machine
from tests.engines import ids
from tests.tensor_parallel.kills import kills

PROMPTS = [[5, 9, 13], [*range(3, 100)]]
PARAMS = SamplingParams(max_new_tokens=32, temperature=0.8, seed=5, ignore_eos=True)
DRAFTER = "prompt_lookup,adaptive=false"


def main(rounds: int, out: Path, model: str = "smollm2-135m") -> None:
    expected = ids(Engine(model, drafter="none", device="cpu").generate(PROMPTS, PARAMS))
    done = []
    for kill in kills(
        lambda: Engine(model, drafter=DRAFTER, device="cpu", tensor_parallel=2),
        PROMPTS,
        PARAMS,
        expected,
        rounds,
        seed=1,
    ):
        done.append(kill)
        print(len(done), *kill, flush=True)
    delays = sorted(kill.seconds for kill in done if kill.when != "later")
    result = {
        "model": model,
        "commit": commit(),
        "machine": machine(),
        "tensor_parallel": 2,
        "kills": dict(Counter(kill.when for kill in done)),
        "seconds_to_the_error": {"median": round(delays[len(delays) // 2], 3), "most": round(delays[-1], 3)},
        "processes_left": 0,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
