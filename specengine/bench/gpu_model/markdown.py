"""The model's results in the documentation."""

from __future__ import annotations

from typing import Any

from specengine.bench.gpu_model.report import wanted


def model_lines(data: dict[str, Any], name: str) -> list[str]:
    """Returns goals and cycles of `results` as lines of Markdown.  name: of the file that they come from."""
    return [
        f"Modelled, not measured: {data['gpu_model'].upper()}, {data['shapes']} (`bench/{name}`):",
        "",
        "| goal | modelled | wanted |",
        "|---|---|---|",
        *(_goal_row(goal) for goal in data["modelled_goals"]),
        "",
        "| cycle | modelled ms | launches | DRAM, GB | L2, GB | kernels with most modelled time, us each |",
        "|---|---|---|---|---|---|",
        *(_cycle_row(cycle) for cycle in data["modelled_cycles"]),
        "",
        "Verification of one request by other rules than `match`, 60 nodes, temperature 1, to the compaction: us. Each",
        "pair is with several blocks a row, and in one block. The compaction comes on top of each.",
        "",
        "| rule | launches | five children accepted | the root refuses both children | compaction |",
        "|---|---|---|---|---|",
        *(_rule_row(each) for each in data["modelled_rules"]),
        "",
        "Linear layers with weights in codes on an H100, modelled without arithmetic: lower bounds of the time.",
        "Shares are of the peak bandwidth. Marlin's are published, at one row of x.",
        "",
        "| format, layer | weight, MB | us at 1, 8, 16 rows | share of the peak | Marlin |",
        "|---|---|---|---|---|",
        *(_coded_row(each) for each in data["modelled_coded_linears"]),
        "",
        "Passes of Qwen3-30B-A3B, bfloat16, on the GPU of the cycles. Speculation pays where a pass commits more",
        "tokens than its time over plain.",
        "",
        "| pass | rows | experts per layer | modelled ms | over plain | DRAM, GB |",
        "|---|---|---|---|---|---|",
        *(_mixture_row(each) for each in data["modelled_mixture"]),
        "",
        "Passes of hybrids, bfloat16, on the same GPU, with the replay of states that every captured cycle has. Bytes",
        "give the times of the gated delta rule's kernels, which are lower bounds. The pass reads states and writes",
        "records. The replay reads its records, and reads and writes states.",
        "",
        "| model, pass | rows | experts | modelled ms | over plain | DRAM, GB | states, records, replay: MB |",
        "|---|---|---|---|---|---|---|",
        *(_hybrid_row(each) for each in data["modelled_hybrids"]),
    ]


def _goal_row(goal: dict[str, Any]) -> str:
    return f"| {goal['name']} | {goal['modelled']:.3g} {goal['unit']} | {wanted(goal)} |"


def _rule_row(each: dict[str, Any]) -> str:
    accepted = f"{each['accepted_us']:.0f}, {each['accepted_in_one_block_us']:.0f}"
    refused = f"{each['refused_us']:.0f}, {each['refused_in_one_block_us']:.0f}" if each["refused_us"] else ""
    return f"| `{each['rule']}` | {each['launches']} | {accepted} | {refused} | {each['compact_kv_us']:.1f} |"


def _coded_row(each: dict[str, Any]) -> str:
    us = ", ".join(f"{us:.1f}" for us in each["modelled_us"])
    shares = ", ".join(f"{share:.0%}" for share in each["modelled_share"])
    published = each["published_marlin_share"]
    marlin = f"{published:.0%}" if published else ""
    return f"| {each['format']}, {each['layer']} | {each['weight_bytes'] / 1e6:.1f} | {us} | {shares} | {marlin} |"


def _cycle_row(cycle: dict[str, Any]) -> str:
    most = sorted(cycle["kernels"], key=lambda step: step["times"] * step["modelled_us"], reverse=True)[:5]
    slowest = ", ".join(f"{step['label']} {step['modelled_us']:.1f}" for step in most)
    moved = f"{cycle['dram_bytes'] / 1e9:.1f} | {cycle['l2_bytes'] / 1e9:.1f}"
    return f"| {cycle['name']} | {cycle['modelled_ms']:.2f} | {cycle['launches']} | {moved} | {slowest} |"


def _mixture_row(each: dict[str, Any]) -> str:
    times = f"{each['modelled_ms']:.2f} | {each['over_plain']:.2f}x | {each['dram_bytes'] / 1e9:.1f}"
    return f"| {each['pass']} | {each['rows']} | {each['experts_per_layer']} | {times} |"


def _hybrid_row(each: dict[str, Any]) -> str:
    times = f"{each['modelled_ms']:.2f} | {each['over_plain']:.2f}x | {each['dram_bytes'] / 1e9:.1f}"
    states = ", ".join(f"{each[key] / 1e6:.0f}" for key in ("state_bytes", "record_bytes", "replay_bytes"))
    name, experts = f"{each['model']}, {each['pass']}", each["experts_per_layer"] or ""
    return f"| {name} | {each['rows']} | {experts} | {times} | {states} |"
