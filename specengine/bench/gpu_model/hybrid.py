"""Passes of Qwen3.6-27B and Qwen3.6-35B-A3B, hybrids of gated delta rule and attention, as modelled.

The kernels of the gated delta rule are not counted. Their times follow from bytes alone: of states, of inputs of the
convolution, and of records. So they are lower bounds. Norms, rotation and attention are those that were counted at the
shapes of Llama-3.1-8B, routing that of 128 experts; both are a few microseconds of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specengine.bench.gpu_model.constants import Gpu
from specengine.bench.gpu_model.counts import EXPERT_ROWS
from specengine.bench.gpu_model.mixture import COUNTED, NAMES, distinct_experts
from specengine.bench.gpu_model.passes import PREFIX, Step, linear, op, total
from specengine.bench.gpu_model.roofline import bytes_time
from specengine.bench.kernels.shapes import LLAMA_8B
from specengine.models.config import ModelConfig
from specengine.models.presets import PRESETS
from specengine.utils.gated_delta_config import GatedDeltaConfig

MODELS = {"Qwen3.6-27B": PRESETS["qwen3.6-27b"], "Qwen3.6-35B-A3B": PRESETS["qwen3.6-35b-a3b"]}
FLOAT = 4  # bytes; states and records are float32


@dataclass(frozen=True)
class StateBytes:
    """Bytes of states, of all layers, that a captured cycle's pass and the replay behind it move.

    pass_reads: states at the pass's begin.  records: that the pass writes, also of one row.  replay: states read and
    written, and records read, if every row is accepted.
    """

    pass_reads: int
    records: int
    replay: int


def state_bytes(delta: GatedDeltaConfig, rows: int) -> StateBytes:
    """Returns the bytes of a cycle of one request."""
    states = FLOAT * len(delta.layers) * delta.state_floats
    records = FLOAT * len(delta.layers) * rows * delta.record_floats
    return StateBytes(states, records, 2 * states + records)


def hybrid_pass(gpu: Gpu, config: ModelConfig, rows: int, experts: int = 0) -> list[Step]:
    """Models a pass of one request with logits of every row, and its replay.  experts: that a layer reads."""
    delta = config.gated_delta
    assert delta is not None
    counted = 1 if rows == 1 else max(rows, COUNTED)
    hidden, recurrent, attention = config.hidden_size, len(delta.layers), config.attention_layers
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    columns = delta.conv_channels + delta.value_size + 2 * delta.num_value_heads
    moved = state_bytes(delta, rows)
    return [
        Step("gather_rows", 1, op(gpu, "gather_rows", rows=counted)),
        Step("rms_norm", 2 * config.num_layers + 1, op(gpu, "rms_norm", rows=counted)),
        Step("delta inputs", recurrent, (linear(gpu, counted, columns, hidden),)),
        Step(
            "gated_delta",
            recurrent,
            (bytes_time(moved.records // recurrent, gpu), bytes_time(moved.pass_reads // recurrent, gpu)),
        ),
        Step("delta out", recurrent, (linear(gpu, counted, hidden, delta.value_size),)),
        Step("qkv and gates", attention, (linear(gpu, counted, 2 * (queries + keys), hidden),)),
        Step("rope_cache", attention, op(gpu, "rope_cache", nodes=counted, batch=1)),
        Step("tree_attention", attention, op(gpu, "tree_attention", nodes=counted, batch=1, prefix=PREFIX)),
        Step("o", attention, (linear(gpu, counted, hidden, queries),)),
        *_mlp(gpu, config, rows, counted, experts),
        Step("head", 1, (linear(gpu, counted, config.vocab_size, hidden),)),
        Step("compact_states", 1, (bytes_time(moved.replay, gpu),)),
    ]


def hybrid_passes(gpu: Gpu) -> list[dict[str, Any]]:
    """Returns modelled milliseconds, and bytes by what they are of, of each pass of each model."""
    return [each for name, config in MODELS.items() for each in _passes(gpu, name, config)]


def _passes(gpu: Gpu, model: str, config: ModelConfig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    delta, moe = config.gated_delta, config.moe
    assert delta is not None
    for rows in EXPERT_ROWS:
        laws = [0] if moe is None else dict.fromkeys(distinct_experts(rows, moe.num_experts))
        for experts, law in zip(laws, ("as chains share them", "independent"), strict=False):
            steps, moved = hybrid_pass(gpu, config, rows, experts), state_bytes(delta, rows)
            ms = total(steps) / 1e3
            found.append(
                {
                    "model": model,
                    "pass": NAMES[rows] if rows == 1 or not experts else f"{NAMES[rows]}, experts {law}",
                    "rows": rows,
                    "experts_per_layer": experts or None,
                    "modelled_ms": round(ms, 3),
                    "over_plain": round(ms / found[0]["modelled_ms"], 3) if found else 1.0,
                    "launches": sum(step.launches for step in steps),
                    "dram_bytes": round(sum(step.count * each.dram_bytes for step in steps for each in step.kernels)),
                    "state_bytes": moved.pass_reads,
                    "record_bytes": moved.records,
                    "replay_bytes": moved.replay,
                    "kernels_us": {step.label: round(step.us / step.count, 2) for step in steps},
                }
            )
    return found


def _mlp(gpu: Gpu, config: ModelConfig, rows: int, counted: int, experts: int) -> list[Step]:
    """Models the MLPs, or the experts with the shared one."""
    moe, layers, hidden = config.moe, config.num_layers, config.hidden_size
    inner = config.intermediate_size if moe is None else moe.shared_size
    dense = [
        Step("gate_up", layers, (linear(gpu, counted, 2 * inner, hidden),)),
        Step("silu_mul", layers, op(gpu, "silu_mul", rows=counted)),
        Step("down", layers, (linear(gpu, counted, hidden, inner),)),
    ]
    if moe is None:
        return dense
    own = moe.intermediate_size
    gated_rows = -(-rows * moe.experts_per_token * own // LLAMA_8B.intermediate)  # of silu_mul's counted columns
    return [
        *dense,
        Step("route_rows", layers, op(gpu, "route_rows", rows=rows)),
        Step("group_pairs", layers, op(gpu, "group_pairs", rows=rows)),
        Step("experts' gate_up", layers, op(gpu, "expert_linear", experts=experts, n=2 * own, c=hidden)),
        Step("experts' silu_mul", layers, op(gpu, "silu_mul", rows=gated_rows)),
        Step("experts' down", layers, op(gpu, "expert_linear", experts=experts, n=hidden, c=own)),
        Step("combine_experts", layers, op(gpu, "combine_experts", rows=rows)),
    ]
