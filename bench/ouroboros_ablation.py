"""Ouroboros with and without each of its mechanisms (Zhao et al. 2024, table 3), in tokens per target pass:
python bench/ouroboros_ablation.py QUESTIONS.jsonl[,MORE] LIMIT OUT.json

The small model is the target itself in int4 without the target's noise, so that at a low temperature it is right some
four times in five: sentences that are always or never right leave nothing to learn from. All variants say the same
text, so their cycles are compared question by question. Each question has a pool of its own, as in the paper's table;
`warm` has one for all of them, and `again` is its second pass over the same questions.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from specengine import Engine, SamplingParams
from specengine.bench.questions import load_files
from specengine.models.loading import load_model

BASE = "ouroboros:smollm2-135m,dtype=int4,noise=0,length=4,window=5,ngram=3,adaptive=false"
PARAMS = SamplingParams(max_new_tokens=128, temperature=0.4, seed=1)
VARIANTS = {
    "none": "suffixes=0,inspire=false,refine=never,warm=false",
    "suffixes": "inspire=false,refine=never,warm=false",
    "suffixes, inspiration": "refine=never,warm=false",
    "suffixes, refinement": "inspire=false,warm=false",
    "all": "warm=false",
    "all, warm": "warm=true",
}
PASSES = {"all, warm": 2}
RESAMPLES = 10_000


def cycles(engine: Engine, questions) -> tuple[list[int], list[int]]:
    """Cycles and tokens of every question's first turn."""
    outputs = [engine.generate([{"role": "user", "content": each.turns[0]}], PARAMS) for each in questions]
    return [each.stats.cycles for each in outputs], [len(each.token_ids) for each in outputs]


def saved(ours: list[int], theirs: list[int]) -> dict[str, float]:
    """Share of cycles saved against another variant, and the middle 95 % of it over resampled questions."""
    draw, pairs = random.Random(1), list(zip(ours, theirs, strict=True))

    def share(pairs):
        return 1 - sum(a for a, _ in pairs) / sum(b for _, b in pairs)

    drawn = sorted(share(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return {"share": share(pairs), "low": drawn[RESAMPLES // 40], "high": drawn[-RESAMPLES // 40]}


def main(files: str, limit: int, out: Path) -> None:
    model, questions = load_model("smollm2-135m"), load_files([Path(each) for each in files.split(",")], limit)
    found: dict[str, list[int]] = {}
    rows = []
    for name, options in VARIANTS.items():
        engine = Engine(model, drafter=f"{BASE},{options}", max_batch_size=1)
        for turn in range(PASSES.get(name, 1)):
            label = f"{name}, again" if turn else name
            found[label], tokens = cycles(engine, questions)
            row = {"variant": label, "tau": sum(tokens) / sum(found[label]), "cycles": sum(found[label])}
            if "suffixes" in found:
                row["saved_over_suffixes"] = saved(found[label], found["suffixes"])
            if turn:
                row["saved_over_first_pass"] = saved(found[label], found[name])
            rows.append(row)
            print(row, flush=True)
            about = {"model": "smollm2-135m", "drafter": BASE, "questions": len(questions), "tokens": sum(tokens)}
            about |= {"temperature": PARAMS.temperature, "seed": PARAMS.seed, "variants": rows}
            out.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
