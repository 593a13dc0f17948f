"""Measures Ouroboros with and without each mechanism (Zhao et al. 2024, table 3), in tokens per target pass:
python bench/ouroboros_ablation.py QUESTIONS.jsonl[,MORE] LIMIT OUT.json

The small model is the target in int4 without the target's noise. At a low temperature four of five of its tokens are
accepted; the mechanisms need both accepted and rejected tokens. All variants generate the same text, so their cycles
are compared question by question. Each question has its own phrase pool, as in the paper's table. `warm` has one pool
for all questions, as the engine has, and `again` is its second pass over the same questions.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from specengine import Engine, SamplingParams
from specengine.bench.race.questions import load_files
from specengine.tensor_parallel.loading import load_model

BASE = "ouroboros:smollm2-135m,dtype=int4,noise=0,length=4,window=5,ngram=3,adaptive=false"
PARAMS = SamplingParams(max_new_tokens=128, temperature=0.4, seed=1)
MECHANISMS = {
    "none": "suffixes=0,inspire=false,refine=never",
    "suffixes": "inspire=false,refine=never",
    "suffixes, inspiration": "refine=never",
    "suffixes, refinement": "inspire=false",
    "all": "",
}
VARIANTS = {name: f"{options},warm=false".lstrip(",") for name, options in MECHANISMS.items()}
VARIANTS |= {f"{name}, warm": f"{options},warm=true".lstrip(",") for name, options in MECHANISMS.items()}
PASSES = {"all, warm": 2}
RESAMPLES = 10_000

Counts = list[tuple[int, int]]  # cycles and tokens of each question


def passes(name: str, files: str, limit: int) -> list[Counts]:
    """Returns cycles and tokens of every question's first turn, for each pass over the questions."""
    questions = load_files([Path(each) for each in files.split(",")], limit)
    engine = Engine(load_model("smollm2-135m"), drafter=f"{BASE},{VARIANTS[name]}", max_batch_size=1)
    counts = []
    for _ in range(PASSES.get(name, 1)):
        outputs = [engine.generate([{"role": "user", "content": each.turns[0]}], PARAMS) for each in questions]
        counts.append([(each.stats.cycles, len(each.token_ids)) for each in outputs])
    return counts


def saved(ours: Counts, theirs: Counts) -> dict[str, float]:
    """Returns the share of cycles saved against another variant, and its 95 % interval over resampled questions."""
    draw = random.Random(1)
    pairs = [(a, b) for (a, _), (b, _) in zip(ours, theirs, strict=True)]

    def share(pairs):
        return 1 - sum(a for a, _ in pairs) / sum(b for _, b in pairs)

    resampled = sorted(share(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return {"share": share(pairs), "low": resampled[RESAMPLES // 40], "high": resampled[-RESAMPLES // 40]}


def rows(found: dict[str, Counts]) -> list[dict]:
    """Returns one row per measured variant, in the order of the table, with the cycles saved against others."""
    table = []
    for name in VARIANTS:
        base = "suffixes, warm" if name.endswith("warm") else "suffixes"
        for label in (name, f"{name}, again"):
            if label not in found:
                continue
            cycles, tokens = (sum(column) for column in zip(*found[label], strict=True))
            row = {"variant": label, "tau": tokens / cycles, "cycles": cycles, "tokens": tokens}
            if base in found:
                row["saved_over_suffixes"] = saved(found[label], found[base])
            if label != name:
                row["saved_over_first_pass"] = saved(found[label], found[name])
            table.append(row | {"counts": found[label]})
    return table


def main(files: str, limit: int, out: Path) -> None:
    about = {"command": shlex.join(["python", *sys.argv]), "model": "smollm2-135m", "drafter": BASE}
    about |= {"temperature": PARAMS.temperature, "seed": PARAMS.seed}
    found: dict[str, Counts] = {}
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        jobs = {workers.submit(passes, name, files, limit): name for name in VARIANTS}
        for job in as_completed(jobs):
            for turn, counts in enumerate(job.result()):
                found[f"{jobs[job]}, again" if turn else jobs[job]] = counts
            about["questions"] = len(found[jobs[job]])
            out.write_text(json.dumps(about | {"variants": rows(found)}) + "\n")
            print(jobs[job], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
