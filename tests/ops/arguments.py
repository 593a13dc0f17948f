"""Valid arguments of every op of the extension, by name, for tests that spoil one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ops.cases import ancestor_bits, comb, depths_of, make_cache, randn
from tests.ops.verifying import PARAMS, make_batch

Arguments = dict[str, Any]

TREES, LENGTHS = [comb(5), comb(3)], [61, 2]
PLACE = ("k_cache", "v_cache", "block_table", "lengths", "row_start")


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pack_linear() -> Arguments:
    return {"rows": randn(5, 6), "packed": torch.zeros(2, 6, 16), "first": 3}


def gather_rows() -> Arguments:
    return {"weight": randn(2, 6, 16), "ids": ints(0, 31, 7), "out": torch.zeros(3, 6)}


def linear() -> Arguments:
    return {"x": randn(3, 6), "weight": randn(2, 6, 16), "bias": randn(20), "out": torch.zeros(3, 20)}


def rms_norm() -> Arguments:
    return {"residual": randn(3, 6), "delta": randn(3, 6), "weight": randn(6), "out": torch.zeros(3, 6), "eps": 1e-5}


def silu_mul() -> Arguments:
    return {"gate_up": randn(3, 12), "out": torch.zeros(3, 6)}


def rope_cache() -> Arguments:
    cache = dict(zip(PLACE, make_cache(TREES, LENGTHS, 2, 8, torch.float32).place(), strict=True))
    tables = {"cos": randn(90, 4), "sin": randn(90, 4), "q_norm": randn(8), "k_norm": randn(8)}
    return {"qkv": randn(8, 64), **tables, "depths": depths_of(TREES), **cache, "q": torch.zeros(8, 4, 8), "eps": 1e-5}


def tree_attention() -> Arguments:
    cache = dict(zip(PLACE, make_cache(TREES, LENGTHS, 2, 8, torch.float32).place(), strict=True))
    rest = {"ancestors": ancestor_bits(TREES), "out": torch.zeros(8, 4, 8), "scale": 0.3, "window": 0}
    return {"q": randn(8, 4, 8), **cache, **rest}


def expand_backbone() -> Arguments:
    trees = {name: torch.zeros(2, 8, dtype=torch.int32) for name in ("tokens", "parents", "depths")}
    return {
        "logits": randn(2, 2, 10),
        "root": ints(3, 4),
        "thresholds": torch.tensor([0.3, 0.6]),
        "widths": ints(3, 2, 1),
        **trees,
        "scores": torch.zeros(2, 8),
        "ancestors": torch.zeros(2, 8, 1, dtype=torch.int32),
        "node_counts": ints(0, 0),
        "top_tokens": torch.zeros(2, 2, 3, dtype=torch.int32),
        "top_scores": torch.zeros(2, 2, 3),
    }


def verify_tree() -> Arguments:
    batch = make_batch(TREES, [PARAMS["everything"], PARAMS["bias"]], 20, seed=1)
    tree, history = batch.tree, batch.history
    return {
        "logits": batch.logits,
        **{name: getattr(tree, name) for name in ("tokens", "parents", "row_start")},
        **vars(batch.params),
        "history": history.tokens,
        "history_length": history.length,
        "prompt_length": history.prompt_length,
        "path": torch.zeros(2, 6, dtype=torch.int32),
        "path_length": ints(0, 0),
        "bonus": ints(0, 0),
        "scores": torch.zeros(2, 2, 20),
        "counts": torch.zeros(2, 20, dtype=torch.int32),
    }


def compact_kv() -> Arguments:
    cache = {"k_cache": randn(2, 5, 2, 64, 8), "v_cache": randn(2, 5, 2, 64, 8, seed=2)}
    table = {"block_table": ints([4, 2], [0, 1]), "lengths": ints(62, 3)}
    return {**cache, **table, "path": ints([0, 2, 4], [1, 5, -1]), "path_length": ints(3, 2)}


OPS: dict[str, Callable[[], Arguments]] = {
    op.__name__: op
    for op in (
        *(pack_linear, gather_rows, linear, rms_norm, silu_mul, rope_cache),
        *(tree_attention, expand_backbone, verify_tree, compact_kv),
    )
}
OPTIONAL = {
    *(("linear", "bias"), ("rms_norm", "delta"), ("rope_cache", "q_norm"), ("rope_cache", "k_norm")),
    ("tree_attention", "ancestors"),
}


def tensors_of(arguments: Arguments) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


TENSORS = [(op, name) for op, make in OPS.items() for name in tensors_of(make())]
