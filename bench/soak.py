"""Measures the memory of drafters with pools after many tokens: python bench/soak.py 1000000 OUT.json

A small random model at temperature 1 repeats no text, which fills pools fastest. The process's resident memory is
recorded at intervals, beside the size and the bound of each pool.
"""

from __future__ import annotations

import gc
import json
import platform
import random
import sys
import time
from pathlib import Path

from specengine import Engine, SamplingParams

DRAFTERS = {
    "none": "none",
    "prompt_lookup": "prompt_lookup,adaptive=false",
    "suffix": "suffix,adaptive=false,remember=50000",
    "lookahead": "lookahead,adaptive=false,warm=true,window=3,ngram=4,guesses=3,keys=200",
    "ouroboros": "ouroboros:self,layers=1,adaptive=false,window=3,ngram=4,length=3,keys=200",
}
RECORDS = 10  # per drafter


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def pool_sizes(drafter) -> dict[str, int]:
    """Returns the sizes of a drafter's phrase pool or of its texts of earlier requests; nothing for other drafters."""
    if (pool := getattr(drafter, "pool", None)) is not None:
        return {"phrases": len(pool), "tokens": len(pool.tokens()), "most_bytes": pool.most_bytes}
    if getattr(drafter, "earlier", None) is not None:
        automata = drafter.earlier.automata()
        return {"tokens": sum(map(len, automata)), "bytes": sum(each.bytes for each in automata)}
    return {}


def soak(spec: str, tokens: int) -> list[dict[str, float]]:
    engine = Engine("random:tiny-llama", drafter=spec, max_batch_size=8)
    draw = random.Random(1)
    records: list[dict[str, float]] = []
    made = 0
    seed = 0
    began = time.perf_counter()
    while made < tokens:
        seed += 1
        prompts = [[draw.randrange(3, 200) for _ in range(draw.randrange(1, 200))] for _ in range(16)]
        params = SamplingParams(max_new_tokens=300, temperature=1.0, seed=seed, ignore_eos=True)
        made += sum(len(output.token_ids) for output in engine.generate(prompts, params))
        if made >= tokens * (len(records) + 1) / RECORDS:
            gc.collect()
            record = {"made": made, "seconds": round(time.perf_counter() - began), "resident_bytes": resident_bytes()}
            records.append(record | pool_sizes(engine.drafter))
            print(spec, records[-1], flush=True)
    return records


def main(tokens: int, out: Path) -> None:
    results = {name: {"drafter": spec, "notes": soak(spec, tokens)} for name, spec in DRAFTERS.items()}
    about = {"command": f"python bench/soak.py {tokens} {out}", "machine": platform.processor() or platform.machine()}
    out.write_text(json.dumps(about | {"drafters": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
