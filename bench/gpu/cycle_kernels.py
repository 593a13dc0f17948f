"""Lists the kernels of captured cycles and their times.

    python bench/gpu/cycle_kernels.py JSON MODEL DEVICE TOKENS NEW CASE...

A case is DRAFTER@SIZE, a drafter and the requests of a batch. Each has a prompt of TOKENS random tokens and gets NEW.
torch.profiler says when each kernel of a replay begins and ends. A kernel's share is the time from the latest end
before it to its own end: kernels overlap, and shares add up to the cycle. On another device than a GPU, only the calls
are made that would be profiled.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Kernel = dict[str, Any]
LEAST = 20  # kernels of a replay; smaller groups are calls between cycles
SHOWN = 14  # kernels of a case that are printed


def short_name(name: str) -> str:
    """Returns a kernel's name with its template's arguments, without namespaces, return type and parameters."""
    name = re.sub(r"\(anonymous namespace\)::|\bspecengine::|^void ", "", name)
    return re.sub(r"\((?!anonymous).*$", "", name)[:100]


def replays(events: Iterable[Kernel]) -> list[list[Kernel]]:
    """Returns the kernels of every graph replay, in their order; all of one replay have one correlation."""
    groups: dict[int, list[Kernel]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            groups.setdefault(event["args"]["correlation"], []).append(event)
    return [sorted(group, key=lambda each: each["ts"]) for group in groups.values() if len(group) >= LEAST]


def shares(replay: list[Kernel]) -> list[float]:
    """Returns each kernel's share of a replay, in us."""
    end, found = replay[0]["ts"], []
    for kernel in replay:
        until = max(end, kernel["ts"] + kernel["dur"])
        found.append(until - end)
        end = until
    return found


def summary(events: Iterable[Kernel]) -> dict[str, Any]:
    """Returns the median cycle in us, its kernels by name and in sequence. Raises ValueError without a replay."""
    found = replays(events)
    if not found:
        raise ValueError("no replay of a graph was profiled")
    sizes = [len(replay) for replay in found]
    usual = [replay for replay in found if len(replay) == statistics.mode(sizes)]
    lengths = [sum(shares(replay)) for replay in usual]
    middle = usual[lengths.index(statistics.median_low(lengths))]
    by_name: dict[str, list[tuple[float, float]]] = {}
    for kernel, share in zip(middle, shares(middle), strict=True):
        by_name.setdefault(short_name(kernel["name"]), []).append((share, kernel["dur"]))
    kernels = [
        {
            "kernel": name,
            "count": len(each),
            "share_us": round(sum(share for share, _ in each), 2),
            "median_share_us": round(statistics.median(share for share, _ in each), 2),
            "median_us": round(statistics.median(duration for _, duration in each), 2),
        }
        for name, each in by_name.items()
    ]
    begin = middle[0]["ts"]
    sequence = [
        [short_name(k["name"]), round(k["ts"] - begin, 2), round(k["dur"], 2), k["args"].get("grid")] for k in middle
    ]
    return {
        "cycles": len(usual),
        "median_us": statistics.median(lengths),
        "launches": len(middle),
        "kernels": sorted(kernels, key=lambda kernel: -kernel["share_us"]),
        "sequence": sequence,
    }


def profiled(model: Any, device: str, tokens: int, new: int, case: str) -> dict[str, Any]:
    """Generates with a new engine twice, the second time under the profiler, and returns what it saw."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from specengine import SamplingParams
    from specengine.bench.race.contenders import open_contender

    drafter, _, size = case.rpartition("@")
    engine = open_contender(model, drafter, max_batch_size=int(size))
    vocab = model.target.config.vocab_size
    prompts = [
        [5 + (7919 * (i + request) + i * i) % (vocab - 5) for i in range(tokens)] for request in range(int(size))
    ]
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    engine.generate(prompts, params)
    if device != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts, params)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summary(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def shown(case: str, found: dict[str, Any]) -> None:
    """Prints the kernels of a case with the largest shares."""
    if not found:
        return
    print(f"{case}: {found['median_us'] / 1000:.3f} ms, {found['launches']} launches, {found['cycles']} cycles")
    for kernel in found["kernels"][:SHOWN]:
        share = f"{kernel['share_us']:9.1f} us {kernel['count']:4} x {kernel['median_share_us']:7.2f}"
        print(f"  {share} ({kernel['median_us']:7.2f}) {kernel['kernel'][:70]}")


def main(path: Path, name: str, device: str, tokens: int, new: int, cases: list[str]) -> int:
    from specengine.tensor_parallel.loading import load_model

    model = load_model(name, device=device)
    results: dict[str, Any] = {}
    measured: list[list[Any]] = []
    for case in cases:
        try:
            results[case] = profiled(model, device, tokens, new, case)
            shown(case, results[case])
            measured.append([f"{case}: a cycle under the profiler", results[case].get("median_us", 0) / 1000, "ms"])
        except Exception:  # of any kind: the next case may be well
            traceback.print_exc()
            results[case] = {"failed": traceback.format_exc(limit=0).strip()}
        path.write_text(json.dumps({"cycles": results, "measured": measured}), encoding="utf-8")
        gc.collect()  # an engine that failed may live in its exception's frames
    return 1 if len(measured) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:]))
