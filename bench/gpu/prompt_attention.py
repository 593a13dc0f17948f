"""Times passes over prompts: the kernel beside PyTorch's attention, and the host.

    python bench/gpu/prompt_attention.py JSON MODEL DEVICE ROUNDS ROWS:PREFIX...

Each pair is one chain of ROWS rows behind PREFIX cached tokens, of one layer of the model's shape: it judges
tree_attention.LIBRARY_FROM. The host's time is that of the calls of a pass over the first pair by all layers, of
which nothing waits for the device.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specengine._C import PAGE_SIZE, KVCacheView
from specengine.draft_trees.tree import TreeBatch
from specengine.models.transformer import Transformer
from specengine.ops import tree_attention
from specengine.ops.prefill.chains import Chain, PromptChains
from specengine.tensor_parallel.loading import load_model

CALLS = 10  # of a round: so many layers of a pass
WAYS = {"kernel": 1 << 62, "library": 0}  # LIBRARY_FROM
Times = dict[str, Any]


def seconds_of(call: Callable[[], None], device: torch.device, rounds: int) -> tuple[float, float]:
    """Returns the least seconds of a call, and those of them that the host needs, of some rounds of CALLS calls."""
    best = host = math.inf
    for _ in range(rounds + 1):  # the first one warms up
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        launched = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, host = min(best, time.perf_counter() - begin), min(host, launched - begin)
    return best / CALLS, host / CALLS


def attention_of(target: Transformer, rows: int, prefix: int, rounds: int) -> Times:
    """Returns the microseconds of one layer's attention by both ways, and what LIBRARY_FROM chooses."""
    c, device = target.config, target.device
    pages = -(-(prefix + rows) // PAGE_SIZE)
    half = torch.bfloat16
    k, v = (torch.randn(pages, c.num_kv_heads, PAGE_SIZE, c.head_dim, device=device).to(half) for _ in range(2))
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    lengths, starts = (torch.tensor(ints, dtype=torch.int32, device=device) for ints in ([prefix], [0, rows]))
    cache = KVCacheView(k, v, table, lengths, starts, 0)
    q = torch.randn(rows, c.num_heads, c.head_dim, device=device)
    out = torch.empty_like(q, dtype=half if device.type == "cuda" else torch.float32)
    most = tree_attention.LIBRARY_FROM
    work = Chain(0, 0, rows, prefix).pairs(0) * c.num_heads * c.head_dim
    found: Times = {"rows": rows, "prefix": prefix, "chosen": "library" if work > most else "kernel"}
    arrived = tree_attention.arrival_counters(device)
    for way, limit in WAYS.items():
        chains = PromptChains.of([0, rows], [prefix])

        def call(chains: PromptChains = chains) -> None:
            tree_attention.tree_attention_cuda(
                q, cache, None, out, c.head_dim**-0.5, 0, arrived=arrived, prefetch=False, chains=chains
            )

        tree_attention.LIBRARY_FROM = limit
        try:
            found[f"{way}_us"], found[f"{way}_host_us"] = (1e6 * each for each in seconds_of(call, device, rounds))
        finally:
            tree_attention.LIBRARY_FROM = most
    return found


def host_ms(target: Transformer, rows: int, prefix: int, rounds: int) -> float:
    """Returns the milliseconds of the host's calls of a pass, layout included."""
    target.ensure_positions(prefix + rows)
    cache = target.new_cache()
    pages = [cache.allocate(prefix + rows)]
    best = math.inf
    for _ in range(rounds + 1):
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        begin = time.perf_counter()
        tree = TreeBatch.chains([[5] * rows], target.device)
        target.hidden_states(tree, cache, cache.batch(pages, [prefix]))
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def main(path: Path, name: str, device: str, rounds: int, pairs: list[tuple[int, int]]) -> None:
    target = load_model(name, device=device).target
    found, measured = list[Times](), list[list[Any]]()
    host = host_ms(target, *pairs[0], rounds)
    for rows, prefix in pairs:
        times = attention_of(target, rows, prefix, rounds)
        found.append(times)
        print(times, flush=True)
        measured += [[f"{rows} rows behind {prefix}: {way}", times[f"{way}_us"], "us"] for way in WAYS]
    right = [times["chosen"] == min(WAYS, key=lambda way: times[f"{way}_us"]) for times in found]
    measured.append(["pairs whose faster way is chosen", 100 * sum(right) / len(right), "%"])
    results = {"host_ms": host, "prompt_attention": found, "measured": measured}
    path.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    sizes = [(int(rows), int(prefix)) for rows, _, prefix in (text.partition(":") for text in sys.argv[5:])]
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sizes)
