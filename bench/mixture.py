"""Times passes of a mixture of experts by rows: python bench/mixture.py OUT.json [MODEL] [DTYPE]

Rounds interleave a read of plain memory with passes of 1 to 32 random tokens. Each pass is compared with the bytes that
it reads at the speed of that round's read, and with what the draft policy's cost model expects after the first half.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specengine.bench.machine import commit, machine, versions
from specengine.bench.report.writing import write_json
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.expert_reads import ExpertReads
from specengine.draft_trees.tree import TreeBatch
from specengine.tensor_parallel.loading import load_model

ROWS = (1, 2, 4, 8, 16, 32)
ROUNDS = 40
READ = 1 << 28  # bytes: more than any cache holds


def seconds_of(work: Any) -> tuple[float, Any]:
    """Returns how long a call takes, and what it returns."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?", default="random:moe-tiny")
    parser.add_argument("dtype", nargs="?", default="int4")
    given = parser.parse_args()
    model = load_model(given.model, device="cpu", dtype=given.dtype)
    target, moe = model.target, model.config.moe
    if moe is None:
        raise SystemExit(f"model: expected a mixture of experts, got {given.model}")
    layers = [layer.moe for layer in target.weights.layers if layer.moe]
    expert = sum(layer.nbytes / layer.experts for layer in layers) / len(layers)
    dense = sum(part.nbytes for part in target.projections) + sum(layer.router.nbytes for layer in layers)
    share = (routed := expert * len(layers) * moe.experts_per_token) / (dense + routed)
    costs = CycleCosts(experts=ExpertReads(moe.num_experts, moe.experts_per_token, share))
    memory, cache = torch.ones(READ // 8, dtype=torch.int64), target.new_cache()
    found: dict[int, list[dict[str, float]]] = {rows: [] for rows in ROWS}
    draw = torch.Generator().manual_seed(0)
    for number in range(ROUNDS):
        for rows in ROWS:
            ids = torch.randint(0, model.config.vocab_size, (rows,), generator=draw).tolist()
            pages, tree = cache.allocate(rows), TreeBatch.chains([ids], target.device)
            batch = cache.batch([pages], [0])
            reading, _ = seconds_of(memory.sum)
            seconds, states = seconds_of(lambda tree=tree, batch=batch: target.hidden_states(tree, cache, batch))
            head, _ = seconds_of(lambda states=states: target.likeliest(states.last))
            cache.free(pages)
            distinct = float(states.experts.sum()) / len(layers)
            curve = costs.curve(1, 0)
            row = {"seconds": seconds + head, "experts": distinct, "expected": curve(rows - 1) * costs.speed}
            row["floor"] = (dense + distinct * len(layers) * expert) * reading / READ
            if number < ROUNDS // 2:
                costs.observe(curve, 0, rows - 1, row["seconds"], distinct)
            else:
                found[rows].append(row)
    rows_of = [
        {
            "rows": rows,
            "experts_per_layer": round(median(row["experts"] for row in all_rows), 2),
            "measured_ms": round(1e3 * median(row["seconds"] for row in all_rows), 3),
            "expected_ms": round(1e3 * median(row["expected"] for row in all_rows), 3),
            "share_of_floor": round(median(row["floor"] / row["seconds"] for row in all_rows), 3),
        }
        for rows, all_rows in found.items()
    ]
    for row in rows_of:
        print(row, flush=True)
    about = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "model": given.model,
        "dtype": given.dtype,
    }
    result = {**about, "exponent": costs.experts and round(costs.experts.exponent, 3), "passes": rows_of}
    write_json(given.out, result)


if __name__ == "__main__":
    main()
