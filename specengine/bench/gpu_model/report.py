"""The model's results as JSON values and as tables, where every figure is marked as modelled."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from specengine.bench.gpu_model.coded import coded_linears
from specengine.bench.gpu_model.constants import Gpu
from specengine.bench.gpu_model.counts import RECORD
from specengine.bench.gpu_model.cycles import Cycle, cycles, goals
from specengine.bench.gpu_model.hybrid import hybrid_passes
from specengine.bench.gpu_model.mixture import mixture_passes
from specengine.bench.gpu_model.passes import PREFIX, Step
from specengine.bench.gpu_model.roofline import KernelTime
from specengine.bench.gpu_model.rules import verification_by_rule

NOT_COUNTED = (
    "kernels of PyTorch and cuBLAS: the former cost a constant each, the latter follow from bytes and operations",
    "kernels of the gated delta rule: their times follow from bytes",
    "arithmetic outside tensor cores, instructions, and waits at barriers",
    "the launch's parameters, constants and stacks",
    "loads that nvcc joins, splits, repeats or drops: the simulator sees the source's accesses",
    "evictions from L1, and from L2 within a kernel; the clock; the host",
)


def results(gpu: Gpu) -> dict[str, Any]:
    """Returns the model's constants, cycles, kernels and goals as JSON values."""
    found = cycles(gpu)
    return {
        "gpu_model": gpu.name,
        "modelled": True,
        "shapes": f"Llama-3.1-8B, bfloat16, {PREFIX} cached tokens per request",
        "constants": asdict(gpu),
        "not_counted": list(NOT_COUNTED),
        "counts": RECORD.name,  # beside the package's other data; has the traffic of every tensor
        "modelled_goals": [{**asdict(goal), "met": goal.met} for goal in goals(gpu, found)],
        "modelled_cycles": [_cycle(cycle) for cycle in found],
        "modelled_rules": verification_by_rule(gpu),
        "modelled_coded_linears": coded_linears(),
        "modelled_mixture": mixture_passes(gpu),
        "modelled_hybrids": hybrid_passes(gpu),
    }


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns `results` as tables: goals, cycles, and the kernels of each cycle."""
    mark = f"modelled, not measured: {data['gpu_model']}, {data['shapes']}"
    out = [_table(f"Goals ({mark})", "goal", "modelled", "wanted", "met")]
    for goal in data["modelled_goals"]:
        out[-1].add_row(goal["name"], f"{goal['modelled']:.3g}", wanted(goal), "yes" if goal["met"] else "no")
    out.append(_table("Cycles (modelled)", "cycle", "modelled ms", "launches", "DRAM GB", "L2 GB"))
    for cycle in data["modelled_cycles"]:
        moved = [f"{cycle[key] / 1e9:.2f}" for key in ("dram_bytes", "l2_bytes")]
        out[-1].add_row(cycle["name"], f"{cycle['modelled_ms']:.2f}", str(cycle["launches"]), *moved)
    for cycle in data["modelled_cycles"]:
        out.append(_kernels(cycle))
    ways = ("launches", "accepted us", "in one block", "refused us", "in one block", "compact_kv us")
    out.append(_table("Verification by rules, 60 nodes (modelled)", "rule", *ways))
    for each in data["modelled_rules"]:
        out[-1].add_row(*("" if value is None else str(value) for value in each.values()))
    rows = data["modelled_coded_linears"][0]["rows"]
    heads = (*(f"us, {m} rows" for m in rows), *(f"share, {m} rows" for m in rows), "Marlin, published")
    out.append(_table("Weights in codes (modelled, lower bounds): H100", "format, layer", "MB", *heads))
    for each in data["modelled_coded_linears"]:
        shares = [f"{share:.0%}" for share in each["modelled_share"]]
        published = each["published_marlin_share"]
        cells = (*(f"{us:.1f}" for us in each["modelled_us"]), *shares, f"{published:.0%}" if published else "")
        out[-1].add_row(f"{each['format']}, {each['layer']}", f"{each['weight_bytes'] / 1e6:.1f}", *cells)
    heads = ("rows", "experts per layer", "modelled ms", "over plain", "DRAM GB")
    out.append(_table("Passes of Qwen3-30B-A3B, bfloat16 (modelled)", "pass", *heads))
    for each in data["modelled_mixture"]:
        times = f"{each['modelled_ms']:.2f}", f"{each['over_plain']:.2f}x", f"{each['dram_bytes'] / 1e9:.2f}"
        out[-1].add_row(each["pass"], str(each["rows"]), str(each["experts_per_layer"]), *times)
    heads = (*heads, "states MB", "records MB", "replay MB")
    out.append(_table("Passes of hybrids, bfloat16 (modelled, lower bounds)", "model, pass", *heads))
    for each in data["modelled_hybrids"]:
        times = f"{each['modelled_ms']:.2f}", f"{each['over_plain']:.2f}x", f"{each['dram_bytes'] / 1e9:.2f}"
        bytes_moved = [f"{each[key] / 1e6:.0f}" for key in ("state_bytes", "record_bytes", "replay_bytes")]
        experts = str(each["experts_per_layer"] or "")
        out[-1].add_row(f"{each['model']}, {each['pass']}", str(each["rows"]), experts, *times, *bytes_moved)
    return out


def wanted(goal: dict[str, Any]) -> str:
    """Returns what a goal asks for, in words."""
    return f"{'at least' if goal['at_least'] else 'at most'} {goal['goal']:g} {goal['unit']}"


def _kernels(cycle: dict[str, Any]) -> Table:
    counts = ("blocks", "waves", "occupancy", "sectors/request", "bank conflicts", "rounds", "chain")
    heads = ("kernel", "times", "modelled us", "bound", "DRAM MB", "L2 MB", *counts)
    out = _table(f"Kernels (modelled): {cycle['name']}", *heads)
    for step in cycle["kernels"]:
        name = step["label"] + (f": {step['kernel']}" if step["kernel"] else "")
        moved = [f"{step[key] / 1e6:.2f}" if step["kernel"] else "" for key in ("dram_bytes", "l2_bytes")]
        counted = step["counted"] or {}
        cells = [
            *(str(counted.get(key, "")) for key in ("blocks", "waves", "occupancy")),
            f"{counted['sectors_per_request']:.1f}" if counted else "",
            f"{counted['bank_conflicts']:.0%}" if counted else "",
            *(str(counted.get(key, "")) for key in ("rounds", "chain")),
        ]
        out.add_row(name, str(step["times"]), f"{step['modelled_us']:.2f}", step["bound"], *moved, *cells)
    return out


def _table(title: str, first: str, *others: str) -> Table:
    out = Table(title=title, title_justify="left")
    out.add_column(first)
    for name in others:
        out.add_column(name, justify="right")
    return out


def _cycle(cycle: Cycle) -> dict[str, Any]:
    kernels = [(step.count, kernel) for step in cycle.steps for kernel in step.kernels]
    return {
        "name": cycle.name,
        "rows": cycle.rows,
        "batch": cycle.batch,
        "modelled_ms": round(cycle.ms, 4),
        "launches": cycle.launches,
        "dram_bytes": round(sum(count * kernel.dram_bytes for count, kernel in kernels)),
        "l2_bytes": round(sum(count * kernel.l2_bytes for count, kernel in kernels)),
        "kernels": [row for step in cycle.steps for row in _step(step)],
    }


def _step(step: Step) -> list[dict[str, Any]]:
    if not step.kernels:
        torch: dict[str, Any] = {"kernel": None, "modelled_us": step.torch_us, "terms_us": {}, "bound": "PyTorch"}
        return [{"label": step.label, "times": step.count, **torch, "dram_bytes": 0, "l2_bytes": 0, "counted": None}]
    return [{"label": step.label, "times": step.count, **_kernel(kernel)} for kernel in step.kernels]


def _kernel(time: KernelTime) -> dict[str, Any]:
    return {
        "kernel": time.kernel,
        "modelled_us": round(time.us, 3),
        "terms_us": {name: round(us, 3) for name, us in time.terms.items()},
        "bound": time.bound,
        "last_block_us": round(time.last_block_us, 3),
        "dram_bytes": time.dram_bytes,
        "l2_bytes": time.l2_bytes,
        "counted": _counted(time),
    }


def _counted(time: KernelTime) -> dict[str, Any] | None:
    launch = time.launch
    if launch is None:
        return None
    traffic = [t for _, t in launch.traffic()]
    conflicts = launch.wavefronts / launch.least_wavefronts - 1 if launch.least_wavefronts else 0.0
    return {
        "blocks": launch.blocks,
        "threads": launch.threads,
        "registers": launch.registers,
        "shared_bytes": launch.shared_bytes,
        "occupancy": time.occupancy,
        "waves": time.waves,
        "sectors_per_request": round(sum(t.sectors for t in traffic) / sum(t.requests for t in traffic), 3),
        "bank_conflicts": round(conflicts, 4),
        "rounds": sum(launch.rounds.values()),
        "chain": launch.chain,
    }
