"""Valid arguments of every op of the extension, by name, for tests that spoil one of them.

An op that takes floats as well as quantised blocks has a case of each; the word after the op's name tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specengine import _C
from specengine.ops.gated_delta.matrices import NO_STATES
from specengine.ops.weight import BLOCK_BYTES
from tests.ops.cases import ancestor_bits, comb, depths_of, make_cache, randn
from tests.ops.verifying import PARAMS, make_batch

Arguments = dict[str, Any]

TREES, LENGTHS = [comb(5), comb(3)], [61, 2]
PLACE = _C.KVCacheView._fields


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def blocks(count: int, bytes: int) -> torch.Tensor:
    """Packed blocks [2, count, bytes] of a quantised weight: no code of theirs is 0, no scale NaN or infinite."""
    return torch.full((2, count, bytes), 0x11, dtype=torch.uint8)


def quantised(rows: int, columns: int) -> torch.Tensor:
    out = torch.zeros(rows, columns // _C.BLOCK, _C.ROW_BLOCK_BYTES, dtype=torch.uint8)
    _C.quantise_rows(randn(rows, columns), out, None)
    return out


def pack_linear() -> Arguments:
    return {"rows": randn(5, 6), "packed": torch.zeros(2, 6, 16), "first": 3}


def pack_linear_quantised() -> Arguments:
    return {"rows": randn(5, 64), "packed": blocks(2, BLOCK_BYTES["q8"]), "first": 3}


def pack_blocks() -> Arguments:
    rows = torch.full((5, 40), 7, dtype=torch.uint8)
    return {"rows": rows, "packed": blocks(2, BLOCK_BYTES["q4_min"]), "first": 3, "type": "Q4_1"}


def requantise_blocks() -> Arguments:
    rows = torch.full((5, 44), 7, dtype=torch.uint8)
    return {"rows": rows, "packed": blocks(2, BLOCK_BYTES["q8"]), "first": 3, "type": "Q5_0"}


def unpack_blocks() -> Arguments:
    return {"rows": torch.full((5, 44), 7, dtype=torch.uint8), "values": torch.zeros(5, 64), "type": "Q5_0"}


def pack_coded() -> Arguments:
    return {
        "codes": torch.full((5, 64), 7, dtype=torch.uint8),
        "scales": torch.ones(5, 2),
        "zeros": torch.full((5, 2), 3, dtype=torch.uint8),
        "minima": None,
        "table": None,
        "packed": blocks(2, BLOCK_BYTES["int4_32"]),
        "first": 3,
        "group": 32,
    }


def gather_rows() -> Arguments:
    return {"weight": randn(2, 6, 16), "ids": ints(0, 31, 7), "out": torch.zeros(3, 6)}


def gather_rows_quantised() -> Arguments:
    return {"weight": blocks(2, BLOCK_BYTES["q4"]), "ids": ints(0, 31, 7), "out": torch.zeros(3, 64)}


def quantise_rows() -> Arguments:
    return {"x": randn(3, 64), "out": torch.zeros(3, 2, _C.ROW_BLOCK_BYTES, dtype=torch.uint8), "columns": None}


def linear() -> Arguments:
    part = {"first": 4, "rows": 20, "variant": 0, "masks": ints([-1], [5], [9])}
    return {"x": randn(3, 6), "weight": randn(2, 6, 16), "bias": randn(30), "out": torch.zeros(3, 30), **part}


def linear_quantised() -> Arguments:
    return {**linear(), "x": quantised(3, 64), "weight": blocks(2, BLOCK_BYTES["q4_min"])}


def linear_argmax() -> Arguments:
    out = {"ids": ints(-7, -7, -7), "keys": torch.zeros(3, dtype=torch.int64), "rows": 20, "variant": 0}
    return {"x": randn(3, 6), "weight": randn(2, 6, 16), "bias": randn(20), "masks": ints([-1], [5], [9]), **out}


def linear_argmax_quantised() -> Arguments:
    return {**linear_argmax(), "x": quantised(3, 64), "weight": blocks(2, BLOCK_BYTES["q8"])}


def rms_norm() -> Arguments:
    kept = {"kept": torch.zeros(3, 2, 6), "place": 1}
    rows = {"residual": randn(3, 6), "delta": randn(3, 6), "weight": randn(6), "out": torch.zeros(3, 6)}
    return {**rows, "eps": 1e-5, **kept}


def rms_norm_quantised() -> Arguments:
    x = {"residual": randn(3, 64), "delta": randn(3, 64), "weight": randn(64)}
    out = torch.zeros(3, 2, _C.ROW_BLOCK_BYTES, dtype=torch.uint8)
    return {**x, "out": out, "eps": 1e-5, "kept": torch.zeros(3, 2, 64), "place": 1}


def silu_mul() -> Arguments:
    return {"gate_up": randn(3, 12), "out": torch.zeros(3, 6)}


def silu_mul_quantised() -> Arguments:
    return {"gate_up": randn(3, 128), "out": torch.zeros(3, 2, _C.ROW_BLOCK_BYTES, dtype=torch.uint8)}


def clamped_swiglu() -> Arguments:
    return {**silu_mul(), "limit": 7.0, "alpha": 1.702}


def route_rows() -> Arguments:
    written = {"logits": torch.zeros(3, 7), "experts": ints(*range(6)).view(3, 2), "weights": torch.zeros(3, 2)}
    shared = {"shared_gate": randn(6, seed=4), "shared_scale": torch.zeros(3)}
    return {
        "x": randn(3, 6),
        "router": randn(7, 6, seed=2),
        "bias": randn(7),
        **shared,
        **written,
        "renormalise": False,
    }


def group_pairs() -> Arguments:
    written = {"starts": ints(*[9] * 5), "rows": ints(*[9] * 6), "places": ints(*[9] * 6).view(3, 2)}
    return {"experts": ints(1, 3, 0, 3, 1, 0).view(3, 2), **written}


def expert_linear() -> Arguments:
    """Four experts of 20 columns, the second without a place."""
    places = {"rows": ints(0, 2, 0, 1, 2, 5), "starts": ints(0, 2, 2, 5, 6), "out": torch.zeros(6, 24)}
    return {"x": randn(6, 6), "weight": randn(8, 6, 16), "bias": randn(4, 24), **places, "first": 3, "columns": 20}


def combine_experts() -> Arguments:
    shared = {"shared": randn(3, 5, seed=3), "shared_scale": randn(3, seed=4)}
    pairs = {"places": ints(0, 3, 1, 4, 2, 5).view(3, 2), "weights": randn(3, 2, seed=2)}
    return {"y": randn(6, 5), **pairs, **shared, "out": torch.zeros(3, 5)}


def rope_cache() -> Arguments:
    cache = make_cache(TREES, LENGTHS, 2, 8, torch.float32).view()._asdict()
    tables = {"cos": randn(90, 4), "sin": randn(90, 4), "q_norm": randn(8), "k_norm": randn(8)}
    depths, q = depths_of(TREES), torch.zeros(8, 4, 8)
    return {"qkv": randn(8, 64), **tables, "depths": depths, **cache, "q": q, "eps": 1e-5, "first": 0}


def tree_attention() -> Arguments:
    cache = make_cache(TREES, LENGTHS, 2, 8, torch.float32).view()._asdict()
    rest = {"ancestors": ancestor_bits(TREES), "out": torch.zeros(8, 4, 8), "scale": 0.3, "window": 0}
    optional = {"workspace": torch.zeros(4), "sinks": randn(4), "arrived": ints(*[0] * 32), "upcoming": randn(40)}
    return {"q": randn(8, 4, 8), **cache, **rest, "strict": False, **optional}


def gate_heads() -> Arguments:
    return {"qkv": randn(8, 96), "heads": randn(8, 4, 8, seed=2)}


def gated_delta_layer() -> Arguments:
    """Two key heads of 3 components, four value heads of 5: 32 channels, rows of 60 columns."""
    weights = {"conv": randn(4, 32), "decay": -randn(4, seed=2).abs(), "dt_bias": randn(4, seed=3), "norm": randn(5)}
    return {**weights, "key_heads": 2, "tiled": False}


def delta_states() -> Arguments:
    """The states of two layers and the records of 8 rows of two requests."""
    pool = {"states": randn(3, 2, 4, 3, 5), "conv": randn(3, 2, 3, 32, seed=2), "slots": ints(2, 0)}
    return {**pool, "records": torch.zeros(2, 8, 72), "final": False}


def gated_delta() -> Arguments:
    layer = _C.GatedDeltaLayer(**gated_delta_layer())
    trees = {"row_start": ints(0, 5, 8), "ancestors": ancestor_bits(TREES)}
    rest = {"number": 1, "out": torch.zeros(8, 20), "eps": 1e-6}
    return {"rows": randn(8, 60), "layer": layer, **delta_states(), **trees, **rest}


def compact_states() -> Arguments:
    path = {"path": ints([0, 2, 4], [0, 1, -1]), "path_length": ints(3, 2)}
    return {
        **delta_states(),
        "records": randn(2, 8, 72),
        "row_start": ints(0, 5, 8),
        **path,
        "key_heads": 2,
        "tiled": False,
    }


def projection(rows: int, columns: int, seed: int) -> _C.Projection:
    return _C.Projection((randn(-(-rows // 16), columns, 16, seed=seed),), (rows,), randn(rows, seed=seed), None, False)


def decoder_layer() -> Arguments:
    """Arguments of DecoderLayer for hidden 6, heads 4, kv_heads 2, head_dim 8, intermediate 10."""
    return {
        "attention_norm": randn(6),
        "qkv": projection(64, 6, 1),
        "q_norm": randn(8),
        "k_norm": randn(8),
        "attention_out": projection(6, 32, 2),
        "mlp_norm": randn(6),
        "gate_up": projection(20, 6, 3),
        "down": projection(6, 10, 4),
        "window": 0,
        "moe": (),
        "sinks": None,
        "gated_delta": (),
    }


def lora_module() -> Arguments:
    """Two adapters of a matrix [20, 40], of which the second has rank 5."""
    matrices = {"a": randn(2, 1, 40, 16), "b": randn(2, 2, 16, 16, seed=2)}
    return {**matrices, "ranks": ints(16, 5), "scales": randn(2, seed=3), "first": 3, "rows": 20}


def add_lora() -> Arguments:
    rest = {"row_start": ints(0, 2, 3, 7), "adapters": ints(1, -1, 0), "out": randn(7, 30, seed=4)}
    return {"x": randn(7, 40, seed=5), **lora_module(), **rest, "workspace": torch.zeros(7 * 16)}


def lora_layers() -> list[Any]:
    """What two adapters add to q of each layer of decoder()."""
    module = {"a": randn(2, 1, 6, 16), "b": randn(2, 2, 16, 16, seed=2), "ranks": ints(16, 5), "scales": randn(2)}
    adapted = _C.LoraProjection((_C.LoraModule(**module, first=0, rows=32),))
    return [_C.LoraLayer(adapted, *[_C.LoraProjection(())] * 3)] * 2


def decoder() -> Arguments:
    sizes = {"hidden": 6, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 10, "eps": 1e-5}
    layers = [_C.DecoderLayer(**decoder_layer()) for _ in range(2)]
    rest = {"first_columns": 0, "hidden_state_layers": (0, 2), "lora": ()}
    rest["multipliers"] = _C.Multipliers(embedding=1.0, attention=8**-0.5, residual=1.0)
    rest["rotated"] = 8
    return {"embedding": randn(2, 6, 16), "layers": layers, "final_norm": randn(6), **sizes, **rest}


def decoder_pass() -> Arguments:
    native = _C.Decoder(**decoder() | {"lora": lora_layers()})
    first, second = (make_cache(TREES, LENGTHS, 2, 8, torch.float32).view() for _ in range(2))
    k, v = torch.stack([first.k_cache, second.k_cache]), torch.stack([first.v_cache, second.v_cache])
    return {
        "decoder": native,
        "tokens": ints(*range(8)),
        "inputs": None,
        "first_inputs": None,
        "depths": depths_of(TREES),
        "ancestors": ancestor_bits(TREES),
        **first._replace(k_cache=k, v_cache=v)._asdict(),
        "cos": randn(90, 4),
        "sin": randn(90, 4),
        "hidden_states": torch.zeros(8, 6),
        "at_layers": torch.zeros(8, 2, 6),
        "experts": torch.zeros(2, dtype=torch.int32),
        "workspace": torch.zeros(native.workspace_bytes(8), dtype=torch.uint8),
        "adapters": ints(1, 0),
        "states": NO_STATES,
    }


def decoder_pass_fed() -> Arguments:
    """Rows that a drafter makes enter the first layer, which has no norm of its own."""
    layers = [_C.DecoderLayer(**{**decoder_layer(), **changes}) for changes in ({"attention_norm": None}, {})]
    native = _C.Decoder(**{**decoder(), "embedding": None, "layers": layers, "lora": lora_layers()})
    return {**decoder_pass(), "decoder": native, "tokens": None, "inputs": randn(8, 6, seed=5)}


def grow_level() -> Arguments:
    """The second level of two trees: two children of each of two nodes, of which two are expanded."""
    scores = torch.tensor([[0.0, -1.0, -2.0, *[0.0] * 4]] * 2)
    beam = {"beam": torch.zeros(2, 2, dtype=torch.int32), "tokens": ints(0, 0, 0, 0), "depths": ints(0, 0, 0, 0)}
    return {
        "best_tokens": ints([3, 4], [5, 6], [7, 8], [9, 1]),
        "best_scores": torch.tensor([[-0.5, -1.0], [-0.1, -3.0], [-2.0, -2.5], [-1.0, -1.5]]),
        "token_ids": torch.arange(10, dtype=torch.int32) + 5,
        "order": ints(1, 2),
        "listed": ints(0, 1, 2, 3),
        "roots": ints([3], [4]),
        "known": ints(1, 1),
        "candidates.tokens": ints([3, 1, 2, *[0] * 4], [4, 2, 1, *[0] * 4]),
        "candidates.parents": ints([-1, *[0] * 6], [-1, *[0] * 6]),
        "candidates.depths": ints([0, 1, 1, *[0] * 4], [0, 1, 1, *[0] * 4]),
        "candidates.scores": scores,
        "before.beam": ints([1, 2], [2, 1]),
        "before.ancestors": ints([3], [5], [3], [5]),
        **{f"after.{name}": value for name, value in beam.items()},
        "after.ancestors": torch.zeros(4, 1, dtype=torch.int32),
        "after.above": torch.zeros(4, dtype=torch.int64),
        "origin": torch.arange(4),
        "first": 3,
        "first_node": 3,
    }


def expand_level() -> Arguments:
    """The same of logits, to which each row adds its own."""
    grown = grow_level()
    del grown["best_tokens"], grown["best_scores"]
    return {
        "logits": randn(2, 10),
        "delta": randn(4, 10, seed=2),
        "confidence": randn(4, seed=3),
        "thresholds": torch.tensor([0.3, 0.6]),
        "widths": ints(2, 1, 1),
        **grown,
        "parts.tokens": torch.zeros(4, 1, 2, dtype=torch.int32),
        "parts.scores": torch.zeros(4, 1, 2),
        "parts.sums": torch.zeros(4, 1),
        "parts.arrived": ints(0, 0),
    }


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
        "top_tokens": torch.zeros(2, 2, 1, 3, dtype=torch.int32),
        "top_scores": torch.zeros(2, 2, 1, 3),
        "sums": torch.zeros(2, 2, 1),
        "arrived": ints(0, 0),
        "token_ids": torch.arange(10, dtype=torch.int32) + 5,
    }


def _parts(rows: int, requests: int) -> Arguments:
    return {
        "parts.tokens": torch.zeros(rows, 1, 2, dtype=torch.int32),
        "parts.scores": torch.zeros(rows, 1, 2),
        "parts.sums": torch.zeros(rows, 1),
        "parts.arrived": torch.zeros(requests, dtype=torch.int32),
    }


def _growing(columns: int) -> Arguments:
    """What ops take that grow trees of two requests, of ten tokens."""
    shape = (2, columns)
    names = ("tokens", "parents", "depths")
    return {
        "token_ids": torch.arange(10, dtype=torch.int32) + 5,
        "roots": ints([3], [4]),
        "known": ints(1, 1),
        "limits.limits": ints(2, 2),
        "limits.history_length": ints(4, 4),
        "limits.final_length": ints(9, 9),
        "limits.active": ints(1, 1),
        **{f"candidates.{name}": torch.zeros(shape, dtype=torch.int32) for name in names},
        "candidates.scores": torch.zeros(shape),
    }


def top_tokens() -> Arguments:
    found = {"tokens": torch.zeros(3, 2, dtype=torch.int32), "log_probs": torch.zeros(3, 2)}
    return {"logits": randn(3, 10), **_parts(3, 3), **found}


def expand_levels() -> Arguments:
    shape = {
        "shape.kind": 0,
        "shape.ranks": ints(0, 1, 1),
        "shape.parents": ints(0, 0, 1),
        "shape.depths": ints(1, 1, 2),
    }
    shape |= {"shape.thresholds": None, "shape.widths": None, "shape.beta": 1.0}
    return {
        "logits": randn(4, 10),
        **shape,
        **_parts(4, 2),
        **_growing(4),
        "history": None,
        "levels": 2,
        "by_request": True,
    }


def expand_levels_widths() -> Arguments:
    shape = dict.fromkeys(("shape.ranks", "shape.parents", "shape.depths"))
    shape |= {"shape.thresholds": torch.tensor([0.3, 0.6]), "shape.widths": ints(2, 1, 1)}
    return {**expand_levels(), **_growing(5), **shape, "shape.kind": 1}


def expand_node() -> Arguments:
    ints_of = {name: torch.zeros(2, 4, dtype=torch.int32) for name in ("nodes.ranks", "nodes.next", "nodes.steps")}
    nodes = {"nodes.tokens": torch.zeros(2, 4, 2, dtype=torch.int32), "nodes.log_probs": torch.zeros(2, 4, 2)}
    nodes |= {"nodes.confidences": torch.zeros(2, 4), **ints_of}
    nodes |= {"nodes.scores": torch.zeros(2, 4, dtype=torch.float64)}
    nodes |= {"nodes.counts": ints(0, 0), "nodes.opened": ints(0, 0)}
    level = {"logits": randn(2, 10), "delta": randn(2, 10, seed=1), "confidence": torch.zeros(2)}
    level |= {"thresholds": None, "widths": None}
    after = {"after.beam": ints([0], [0]), "after.tokens": ints(0, 0), "after.depths": ints(0, 0)}
    after |= {"after.ancestors": ints([0], [0]), "after.above": torch.zeros(2, dtype=torch.int64)}
    shape = dict.fromkeys(f"shape.{name}" for name in _C.LevelShape._fields) | {"shape.kind": 2, "shape.beta": 1.0}
    return {**level, **_parts(2, 2), **nodes, **_growing(4), **after, **shape, "levels": 2, "step": 0}


def select_nodes() -> Arguments:
    return {
        "tokens": ints([5, 6, 7, 8, 9], [4, 3, 2, 1, 0]),
        "parents": ints([-1, 0, 0, 1, 2], [-1, 0, -1, 0, 3]),
        "depths": ints([0, 1, 1, 2, 2], [0, 1, -1, 1, 2]),
        "scores": torch.tensor([[0.0, -2.0, -1.0, -4.0, -3.0], [0.0, -1.0, 0.0, -1.0, -1.5]]),
        "limits": ints(2, 1),
        **{name: torch.zeros(2, 4, dtype=torch.int32) for name in ("out_tokens", "out_parents", "out_depths", "kept")},
        "ancestors": torch.zeros(2, 4, 1, dtype=torch.int32),
        "node_counts": ints(0, 0),
    }


def verify_tree() -> Arguments:
    batch = make_batch(TREES, [PARAMS["everything"], PARAMS["bias"]], 20, seed=1)
    tree, history = batch.tree, batch.history
    return {
        "logits": batch.logits,
        **{name: getattr(tree, name) for name in ("tokens", "parents", "row_start")},
        **batch.params.native._asdict(),
        "history": history.tokens,
        "history_length": history.length,
        "prompt_length": history.prompt_length,
        "path": torch.zeros(2, 6, dtype=torch.int32),
        "path_length": ints(0, 0),
        "bonus": ints(0, 0),
        "relaxed": ints(0, 0),
        "scores": torch.zeros(2, 20),
        "counts": torch.zeros(2, 20, dtype=torch.int32),
        "row_states": torch.zeros(8, 149, dtype=torch.int64),
        "weights": None,
        "draft_logits": None,
        "draft_rows": None,
        "draft_index": None,
        "replacement": False,
        "masks": None,
        "rule": "match",
        "options": [],
    }


def verify_tree_sampled() -> Arguments:
    drafted = {"draft_logits": randn(3, 20, seed=4), "draft_rows": ints(0, 1, -1, -1, 2, 0, -1, -1)}
    index = torch.tensor([*range(12), *[-1] * 8], dtype=torch.int32)
    weights = torch.zeros(2, 4, 20, dtype=torch.int64)
    masks = {"masks": torch.full((8, 1), 0xFEEFD, dtype=torch.int32)}
    return {**verify_tree(), **drafted, **masks, "draft_index": index, "weights": weights, "rule": "rejection"}


def draw_siblings() -> Arguments:
    verified = verify_tree()
    shared = ("tokens", "parents", "row_start", "history", "history_length", "prompt_length")
    batch = make_batch(TREES, [PARAMS["everything"], PARAMS["bias"]], 20, seed=1)
    return {
        "logits": randn(3, 20, seed=5),
        "requests": ints(0, 0, 1),
        "nodes": ints(0, 2, 1),
        "index": None,
        **{name: verified[name] for name in shared},
        **batch.params.native._asdict(),
        "drawn": torch.zeros(3, 2, dtype=torch.int32),
        "scores": torch.zeros(3, 20),
        "counts": torch.zeros(3, 20, dtype=torch.int32),
        "weights": torch.zeros(3, 20, dtype=torch.int64),
        "replacement": False,
        "as_match": False,
    }


def compact_kv() -> Arguments:
    cache = {"k_cache": randn(2, 5, 2, 64, 8), "v_cache": randn(2, 5, 2, 64, 8, seed=2)}
    table = {"block_table": ints([4, 2], [0, 1]), "lengths": ints(62, 3)}
    return {**cache, **table, "path": ints([0, 2, 4], [1, 5, -1]), "path_length": ints(3, 2)}


OPS: dict[str, Callable[[], Arguments]] = {
    op.__name__.replace("_quantised", " quantised")
    .replace("_sampled", " sampled")
    .replace("_fed", " fed")
    .replace("_widths", " widths"): op
    for op in (
        *(
            pack_linear,
            pack_linear_quantised,
            pack_blocks,
            requantise_blocks,
            unpack_blocks,
            pack_coded,
            gather_rows,
            gather_rows_quantised,
            quantise_rows,
        ),
        *(linear, linear_quantised, linear_argmax, linear_argmax_quantised, add_lora),
        *(route_rows, group_pairs, expert_linear, combine_experts),
        *(rms_norm, rms_norm_quantised, silu_mul, silu_mul_quantised, clamped_swiglu, rope_cache, tree_attention),
        *(gate_heads, gated_delta, compact_states),
        decoder_pass,
        *(decoder_pass_fed, select_nodes, grow_level, expand_level),
        *(top_tokens, expand_levels, expand_levels_widths, expand_node),
        *(expand_backbone, verify_tree, verify_tree_sampled, draw_siblings, compact_kv),
    )
}
GROWN = ("expand_levels", "expand_levels widths", "expand_node")
OPTIONAL = {
    *((op, "bias") for op in OPS if op.startswith("linear")),
    *((op, "masks") for op in OPS if op.startswith("linear")),
    *(
        ("route_rows", "bias"),
        ("expert_linear", "rows"),
        ("expert_linear", "bias"),
        ("combine_experts", "shared_scale"),
    ),
    *(("decoder_pass", "experts"), ("decoder_pass fed", "experts")),
    *((op, name) for op in ("rms_norm", "rms_norm quantised") for name in ("delta", "kept")),
    *(("rope_cache", "q_norm"), ("rope_cache", "k_norm"), ("expand_backbone", "token_ids")),
    *(("tree_attention", name) for name in ("ancestors", "workspace", "sinks", "arrived", "upcoming")),
    *(("decoder_pass", "ancestors"), ("gated_delta", "ancestors")),
    *(("decoder_pass fed", "ancestors"), ("decoder_pass", "adapters"), ("decoder_pass fed", "adapters")),
    *((op, name) for op in ("grow_level", "expand_level") for name in ("token_ids", "order", "listed", "origin")),
    *(("expand_level", "delta"), ("expand_level", "confidence")),
    *(("verify_tree", "row_states"), ("verify_tree sampled", "row_states"), ("verify_tree sampled", "draft_index")),
    ("verify_tree sampled", "masks"),
    *((op, "token_ids") for op in GROWN),
    *((op, f"limits.{name}") for op in GROWN for name in ("limits", "final_length", "active")),
    ("expand_node", "delta"),
}


# The names under which a record's fields stand in the arguments, so that each can be spoiled.
HISTORY = ("history", "history_length", "prompt_length")
DRAFT = ("draft_logits", "draft_rows", "draft_index", "replacement")

LORA = ("a", "b", "ranks", "scales", "first", "rows")


def _lora(arguments: Arguments) -> Any:
    return _C.LoraProjection((_record(_C.LoraModule, LORA)(arguments),))


def _record(kind: Callable[..., Any], names: Sequence[str]) -> Callable[[Arguments], Any]:
    return lambda arguments: kind(*(arguments.pop(name) for name in names))


def _trees(arguments: Arguments) -> _C.SampledTrees:
    tree = [arguments.pop(name) for name in ("tokens", "parents", "row_start")]
    sampling = _record(_C.SamplingTable, _C.SamplingTable._fields)(arguments)
    return _C.SampledTrees(*tree, sampling, _record(_C.TokenHistory, HISTORY)(arguments))


def _dotted(kind: Callable[..., Any], name: str) -> Callable[[Arguments], Any]:
    """A record of which some fields stand in the arguments, with its own name before theirs."""
    return lambda arguments: kind(*(arguments.pop(f"{name}.{field}", None) for field in kind._fields))


GROWTH = {"candidates": _dotted(_C.CandidateColumns, "candidates")}
GROWING = {"parts": _dotted(_C.VocabularyParts, "parts"), "limits": _dotted(_C.DepthLimits, "limits")}
GROWING |= {**GROWTH, "shape": _dotted(_C.LevelShape, "shape")}
GROWTH |= {name: _dotted(_C.BeamRows, name) for name in ("before", "after")}
GROWTH |= {"entries": _record(_C.LevelEntries, _C.LevelEntries._fields)}
CACHE = {"cache": _record(_C.KVCacheView, PLACE)}
STATES = {"states": _record(_C.DeltaStates, _C.DeltaStates._fields)}
RECORDS: dict[str, dict[str, Callable[[Arguments], Any]]] = {  # of an op's arguments
    "rope_cache": CACHE,
    "tree_attention": CACHE,
    "decoder_pass": {
        **CACHE,
        "rope": _record(_C.RopeTables, _C.RopeTables._fields),
        "outputs": _record(_C.PassOutputs, _C.PassOutputs._fields),
    },
    "gated_delta": STATES,
    "compact_states": STATES,
    "add_lora": {"projection": _lora},
    "grow_level": GROWTH,
    "expand_level": {
        **GROWTH,
        "level": _record(_C.LevelLogits, _C.LevelLogits._fields),
        "parts": _dotted(_C.VocabularyParts, "parts"),
    },
    "top_tokens": {"parts": _dotted(_C.VocabularyParts, "parts")},
    "expand_levels": GROWING,
    "expand_node": {
        "level": _record(_C.LevelLogits, _C.LevelLogits._fields),
        "nodes": _dotted(_C.OpenedNodes, "nodes"),
        "after": _dotted(_C.BeamRows, "after"),
        **GROWING,
    },
    "expand_backbone": {"trees": _record(_C.BackboneTrees, _C.BackboneTrees._fields)},
    "verify_tree": {
        "trees": _trees,
        "draft": _record(_C.DraftLogits, DRAFT),
        "accepted": _record(_C.AcceptedPaths, _C.AcceptedPaths._fields),
        "workspace": _record(_C.VerifyWorkspace, _C.VerifyWorkspace._fields),
    },
    "draw_siblings": {"trees": _trees},
}


def call(op: str, arguments: Arguments) -> None:
    name = op.partition(" ")[0]
    arguments = dict(arguments)
    for record, make in RECORDS.get(name, {}).items():
        arguments[record] = make(arguments)
    getattr(_C, name)(**arguments)


def tensors_of(arguments: Arguments) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


TENSORS = [(op, name) for op, make in OPS.items() for name in tensors_of(make())]
