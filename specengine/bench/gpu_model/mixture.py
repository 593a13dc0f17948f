"""Passes of Qwen3-30B-A3B, a mixture of 128 experts of which a row takes 8, as modelled.

Norms, rotation and attention are those that were counted at the shapes of Llama-3.1-8B, at 8 rows where a pass has
fewer: its rows are wider and it has twice the heads of keys, so these few microseconds are upper bounds.
"""

from __future__ import annotations

from typing import Any

from specengine.bench.gpu_model.constants import Gpu
from specengine.bench.gpu_model.counts import EXPERT_ROWS, EXPERTS, EXPERTS_PER_ROW
from specengine.bench.gpu_model.passes import PREFIX, Step, linear, op, total
from specengine.bench.kernels.shapes import LLAMA_8B, QWEN3_30B_A3B
from specengine.draft_policy.expert_reads import EXPONENT

SHAPES = QWEN3_30B_A3B
NAMES = dict(zip(EXPERT_ROWS, ("plain", "chain of 3", "tree of 16"), strict=True))
COUNTED = 8  # rows from which on attention and norms are counted


def distinct_experts(rows: int, experts: int = EXPERTS) -> tuple[int, int]:
    """Returns how many experts of a layer the rows take, as measured of chains and if they were independent.

    experts: that a layer has.
    """
    share = EXPERTS_PER_ROW / experts
    chained = min(experts, EXPERTS_PER_ROW * rows**EXPONENT)
    return round(chained), round(experts * (1 - (1 - share) ** rows))


def mixture_pass(gpu: Gpu, rows: int, experts: int) -> list[Step]:
    """Models a pass of one request with logits of every row. experts: that a layer reads."""
    counted, layers, hidden = 1 if rows == 1 else max(rows, COUNTED), SHAPES.layers, SHAPES.hidden
    n, inner = SHAPES.linears, SHAPES.intermediate
    gated_rows = -(-rows * EXPERTS_PER_ROW * inner // LLAMA_8B.intermediate)  # of silu_mul's counted columns
    return [
        Step("gather_rows", 1, op(gpu, "gather_rows", rows=counted)),
        Step("rms_norm", 2 * layers + 1, op(gpu, "rms_norm", rows=counted)),
        Step("qkv", layers, (linear(gpu, counted, *n["qkv"]),)),
        Step("rope_cache", layers, op(gpu, "rope_cache", nodes=counted, batch=1)),
        Step("tree_attention", layers, op(gpu, "tree_attention", nodes=counted, batch=1, prefix=PREFIX)),
        Step("o", layers, (linear(gpu, counted, *n["o"]),)),
        Step("route_rows", layers, op(gpu, "route_rows", rows=rows)),
        Step("group_pairs", layers, op(gpu, "group_pairs", rows=rows)),
        Step("experts' gate_up", layers, op(gpu, "expert_linear", experts=experts, n=2 * inner, c=hidden)),
        Step("silu_mul", layers, op(gpu, "silu_mul", rows=gated_rows)),
        Step("experts' down", layers, op(gpu, "expert_linear", experts=experts, n=hidden, c=inner)),
        Step("combine_experts", layers, op(gpu, "combine_experts", rows=rows)),
        Step("head", 1, (linear(gpu, counted, *n["head"]),)),
    ]


def mixture_passes(gpu: Gpu) -> list[dict[str, Any]]:
    """Returns experts, modelled milliseconds and bytes of each pass, and its time over that of one row."""
    found: list[dict[str, Any]] = []
    for rows, name in NAMES.items():
        laws = dict.fromkeys(distinct_experts(rows))  # one row takes as many by either
        for experts, law in zip(laws, ("as chains share them", "independent"), strict=False):
            steps = mixture_pass(gpu, rows, experts)
            found.append(
                {
                    "pass": name if rows == 1 else f"{name}, experts {law}",
                    "rows": rows,
                    "experts_per_layer": experts,
                    "modelled_ms": round(total(steps) / 1e3, 3),
                    "launches": sum(step.launches for step in steps),
                    "dram_bytes": round(sum(step.count * each.dram_bytes for step in steps for each in step.kernels)),
                    "kernels_us": {step.label: round(step.us / step.count, 2) for step in steps},
                }
            )
    for each in found:
        each["over_plain"] = round(each["modelled_ms"] / found[0]["modelled_ms"], 3)
    return found
