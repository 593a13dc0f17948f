"""Measures whether states of a hybrid leak: python bench/soak_states.py 1000000 OUT.json [MODEL]

Requests with shared and own beginnings run in batches; half of them are cancelled at a random token. At intervals the
process's resident memory is recorded, beside the slots of requests and of the prefix cache.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from specengine import Engine, SamplingParams

RECORDS = 20
BEGINNINGS = 40  # of prompts; more of them than the prefix cache has room for


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def soak(model: str, tokens: int) -> list[dict[str, Any]]:
    """Runs requests until `tokens` were generated, and returns the records."""
    engine = Engine(model, drafter="prompt_lookup,min_ngram=1,adaptive=false", max_batch_size=8, prefix_cache_mib=1)
    states = engine.cache.states
    if states is None:
        raise SystemExit(f"{model} has no recurrent states")
    draw, made, seed, records, began = random.Random(1), 0, 0, list[dict[str, Any]](), time.perf_counter()
    beginnings = [[draw.randrange(3, 200) for _ in range(draw.randrange(60, 200))] for _ in range(BEGINNINGS)]

    def prompt() -> list[int]:
        return [*draw.choice(beginnings), *(draw.randrange(3, 200) for _ in range(draw.randrange(1, 60)))]

    while made < tokens:
        seed += 1
        params = SamplingParams(max_new_tokens=200, temperature=0.3, seed=seed, ignore_eos=True)
        made += sum(len(output.token_ids) for output in engine.generate([prompt() for _ in range(8)], params))
        for _ in range(4):
            stream, last = engine.stream(prompt(), params), draw.randrange(200)
            for event in stream:
                made += len(event.token_ids)
                last -= len(event.token_ids)
                if last < 0:
                    break
            stream.close()
        if made >= tokens * (len(records) + 1) / RECORDS:
            gc.collect()
            pages = engine.cache.pages_in_use  # takes back what was freed
            record = {"made": made, "seconds": round(time.perf_counter() - began), "resident_bytes": resident_bytes()}
            record |= {"pages_in_use": pages, "states_in_use": states.in_use, "states_kept": states.kept}
            records.append(record | {"slots": states.slots, "slot_bytes": states.slot_bytes})
            print(records[-1], flush=True)
    return records


def main() -> None:
    tokens, out, model = int(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or ["random:tiny-qwen3.5"])[0]
    out.write_text(json.dumps({"model": model, "records": soak(model, tokens)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
