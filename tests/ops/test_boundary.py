"""What crosses into C++: every op refuses every bad argument by name, and writes nothing when it does."""

import inspect
import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specengine import _C
from specengine.ops.weight import BLOCK_BYTES
from tests.ops.arguments import (
    OPS,
    OPTIONAL,
    TENSORS,
    Arguments,
    ancestor_bits,
    blocks,
    call,
    comb,
    ints,
    make_cache,
    quantised,
    randn,
    tensors_of,
)
from tests.selection import looped

CLASSES = {"Projection", "DecoderLayer", "Decoder", "ExpertProjection", "MoeLayer", "GatedDeltaLayer"}
CLASSES |= {"LoraModule", "LoraProjection", "LoraLayer"}
CLASSES |= {"EagleWeights", "FastEagleWeights", "DraftHead", "HeadsWeights", "GlideWeights"}  # see tests/growth
RECORDS = {"KVCacheView", "SamplingTable", "TokenHistory", "SampledTrees", "DraftLogits", "AcceptedPaths"}
RECORDS |= {"PassOutputs", "Multipliers", "DeltaStates", "CandidateColumns", "BeamRows", "ChainColumns", "SeenKeys"}
RECORDS |= {
    "LevelEntries",
    "VocabularyParts",
    "LevelLogits",
    "SelectedTrees",
    "LevelShape",
    "DepthLimits",
    "OpenedNodes",
}
RECORDS |= {"CodedForm", "RopeTables", "RotatedRows", "VerifyWorkspace", "BackboneTrees"}
NOT_OPS = CLASSES | RECORDS | {"num_threads", "set_num_threads", "instruction_set", "set_instruction_set"}
NOT_OPS |= {"tree_attention_workspace", "set_programmatic_launch"}
NOT_OPS |= {"GrowthShape", "draft_trees", "another_level_pays"}  # see tests/growth
# see tests/pools
NOT_OPS |= {"NgramIndex", "PhrasePool", "SuffixAutomaton", "TextCorpus", "TextDrafts", "sort_suffixes"}
NOT_OPS |= {"read_strings", "checksum", "MappedFile"}  # see tests/models/test_gguf.py and test_kept_weights.py
# see tests/draft_trees
NOT_OPS |= {"TreeRows", "count_sources", "cut_trees", "join_trees", "judge_nodes"}
CUDA_ONLY = {"draft_lookup", "commit_tokens"}  # steps of a cycle on the device, which the host's batch does itself
CUDA_ONLY |= {"pair_rows", "keep_pairs"}  # see test_pairs.py
CUDA_ONLY |= {"add_copies"}  # see test_add_copies.py
CUDA_ONLY |= {"select_limited"}  # see tests/growth
CUDA_ONLY |= {"keep_last", "add_delta"}  # see test_pairs.py and test_add_delta.py
CUDA_ONLY |= {"gru_step"}  # see test_gru_step.py
CUDA_ONLY |= {"join_rows", "text_rows"}  # see test_row_inputs.py and test_text_rows.py
CUDA_ONLY |= {"coded_linear", "coded_linear_argmax", "gather_coded"}  # see test_coded_linear_cuda.py
CUDA_ONLY |= {"coded_expert_linear"}  # see test_experts_cuda.py
CUDA_ONLY |= {"gather_norm", "linear_silu", "linear_norm", "linear_rope"}  # see test_fused_cuda.py


COLUMNS = {f"candidates.{name}" for name in _C.CandidateColumns._fields}
LISTS = {"parts.tokens", "parts.scores"}


def refuse(op: str, arguments: Arguments, message: str) -> None:
    """Expects a ValueError that matches `message` and unchanged tensors."""
    real = {name: value for name, value in tensors_of(arguments).items() if type(value) is torch.Tensor}
    before = {n: t.detach().clone() for n, t in real.items() if t.device.type == "cpu" and not t.is_sparse}
    with pytest.raises(ValueError, match=f"^{message}") as error:
        call(op, arguments)
    assert "\n" not in str(error.value)
    for name, tensor in before.items():
        torch.testing.assert_close(arguments[name], tensor, rtol=0, atol=0, equal_nan=True, msg=f"{name} was written")


def test_the_table_covers_every_op():
    functions = {name for name, value in inspect.getmembers(_C) if callable(value) and not name.startswith("_")}
    assert functions - NOT_OPS - CUDA_ONLY == {op.partition(" ")[0] for op in OPS}


@pytest.mark.parametrize("op", OPS)
def test_the_valid_arguments_are_accepted_and_change_only_outputs(op):
    arguments = OPS[op]()
    before = {name: value.clone() for name, value in tensors_of(arguments).items()}
    call(op, arguments)
    written = {name for name, value in before.items() if not torch.allclose(value, arguments[name], equal_nan=True)}
    outputs = {"packed", "out", "residual", "q", "k_cache", "v_cache", "tokens", "parents", "depths", "scores"}
    outputs |= {"ancestors", "node_counts", "top_tokens", "top_scores", "path", "path_length", "bonus"}
    outputs |= {"keys", "hidden_states", "workspace", "kept", "values"}
    only = {
        "gate_heads": {"heads"},
        "gated_delta": {"out", "records"},
        "compact_states": {"states", "conv"},
        "tree_attention": {"out"},
        "verify_tree": {"path", "path_length", "bonus", "scores"},
        "verify_tree sampled": {"path", "path_length", "bonus", "relaxed", "scores", "weights"},
        "draw_siblings": {"drawn", "scores", "weights"},
        "decoder_pass": {"k_cache", "v_cache", "hidden_states", "at_layers", "experts", "workspace"},
        "decoder_pass fed": {"k_cache", "v_cache", "hidden_states", "at_layers", "experts", "workspace"},
        "grow_level": GROWN,
        "expand_level": GROWN | {"parts.tokens", "parts.scores"},
        "select_nodes": {"out_tokens", "out_parents", "out_depths", "kept", "ancestors", "node_counts"},
        "top_tokens": {"tokens", "log_probs"},
        **{key: {*LISTS, *COLUMNS} for key in ("expand_levels", "expand_levels widths")},
        "expand_node": {*COLUMNS, *(name for name in arguments if name.startswith(("after.", "nodes.")))},
        "linear_argmax": {"ids", "keys"},
        "route_rows": {"logits", "experts", "weights", "shared_scale"},
        "group_pairs": {"starts", "rows", "places"},
        "linear_argmax quantised": {"ids", "keys"},
    }
    assert written and written <= only.get(op, outputs)


@pytest.mark.full
@looped("op, name", TENSORS)
def test_what_is_no_tensor_is_refused(op, name):
    for value in (3, "text", [1.0], object()):
        refuse(op, {**OPS[op](), name: value}, f"{name}: expected a tensor, got {type(value).__name__}")
    if (op, name) in OPTIONAL:
        call(op, {**OPS[op](), name: None})
    else:
        refuse(op, {**OPS[op](), name: None}, f"{name}: expected a tensor, got None")


FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]
TAKEN = {  # dtypes of the arguments that may have several, as the message lists them
    ("pack_linear", "rows"): FLOATS,
    **{(op, "packed"): FORMATS for op in ("pack_linear", "pack_coded")},
    **{(op, "weight"): FORMATS for op in ("gather_rows", "linear", "linear_argmax", "expert_linear")},
    ("route_rows", "router"): FLOATS,
    **{(op, "out"): [torch.float32, torch.uint8] for op in ("rms_norm", "silu_mul", "clamped_swiglu")},
    **{(op, "k_cache"): FLOATS for op in ("rope_cache", "tree_attention", "compact_kv")},
    ("decoder_pass", "k_cache"): FLOATS,
    ("tree_attention", "out"): FLOATS,
    ("tree_attention", "upcoming"): [*FLOATS, torch.uint8],
    ("add_lora", "a"): FLOATS,
}


@looped("op, name", TENSORS)
def test_a_wrong_dtype_is_refused(op, name):
    arguments = OPS[op]()
    taken = TAKEN.get((op.partition(" ")[0], name), [arguments[name].dtype])
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in taken)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    # codes multiply rows of int8, as uint8 blocks, and of float32, which have another shape
    other = {torch.float32} if op in ("linear quantised", "linear_argmax quantised") and name == "x" else set()
    for dtype in (*floats, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool):
        if dtype not in (*taken, *other):
            refuse(op, {**arguments, name: arguments[name].to(dtype)}, f"{name}: expected dtype {expected}, got ")


@looped("op, name", TENSORS)
def test_a_wrong_number_of_dimensions_is_refused(op, name):
    arguments = OPS[op]()
    value = arguments[name]
    refuse(op, {**arguments, name: value[None]}, rf"{name}: expected shape \[.*\].*, got \[1, ")
    refuse(op, {**arguments, name: value[0]}, rf"{name}: expected shape \[.*\].*, got \[")
    deep = value.reshape(*[1] * 7, *value.shape)
    refuse(op, {**arguments, name: deep}, f"{name}: expected a tensor, got a tensor of more than 6 dimensions")


PASSES = ("decoder_pass", "decoder_pass fed")
GROWN = {f"candidates.{name}" for name in _C.CandidateColumns._fields}
GROWN |= {f"after.{name}" for name in _C.BeamRows._fields}
PACKS = ("pack_linear", "pack_linear quantised", "pack_blocks", "requantise_blocks")
GROWS = {  # sizes that are free: larger than needed is fine
    *((op, name, 0) for op in PACKS for name in ("packed", "rows")),
    ("pack_coded", "packed", 0),
    *(("group_pairs", "starts", 0), ("expert_linear", "x", 0)),
    *(("gather_rows", "weight", 0), ("gather_rows quantised", "weight", 0)),
    *((op, name, dim) for op in PASSES for name, dim in (("workspace", 0), ("block_table", 1), ("ancestors", 1))),
    *(("tree_attention", name, 0) for name in ("workspace", "arrived", "upcoming")),
    *(("grow_level", "token_ids", 0), ("expand_level", "parts.arrived", 0)),
    *((op, "block_table", 1) for op in ("rope_cache", "tree_attention", "compact_kv")),
    *((op, name, 1) for op in ("verify_tree", "verify_tree sampled") for name in ("history", "path")),
    *(("verify_tree sampled", "draft_logits", 0), ("verify_tree sampled", "draft_logits", 1)),
    *(("draw_siblings", "history", 1), ("draw_siblings", "drawn", 1)),
    *(("tree_attention", "ancestors", 1), ("compact_kv", "path", 1), ("compact_states", "path", 1)),
    *(("gate_heads", "heads", 1), ("gated_delta", "ancestors", 1)),
    *(("rms_norm", "kept", 1), ("rms_norm quantised", "kept", 1)),
    *(("add_lora", "out", 1), ("add_lora", "workspace", 0)),
    *((op, "parts.arrived", 0) for op in ("top_tokens", "expand_levels", "expand_levels widths", "expand_node")),
    *(("expand_node", "after.ancestors", 1), ("top_tokens", "logits", 1)),
}


@looped("op, name", TENSORS)
def test_a_wrong_size_is_refused_by_the_argument_or_the_one_it_disagrees_with(op, name):
    arguments = OPS[op]()
    for dim in range(arguments[name].ndim):
        shape = list(arguments[name].shape)
        shape[dim] += 1
        larger = arguments[name].new_zeros(shape)
        larger[tuple(map(slice, arguments[name].shape))] = arguments[name]
        if (op, name, dim) in GROWS:
            call(op, {**arguments, name: larger})
        else:
            refuse(op, {**arguments, name: larger}, f"({'|'.join(arguments)}): ")


@looped("op, name", TENSORS)
def test_a_strided_tensor_is_refused(op, name):
    arguments = OPS[op]()
    strided = torch.stack([arguments[name]] * 2, dim=-1)[..., 0]
    refuse(op, {**arguments, name: strided}, f"{name}: expected a contiguous tensor, got stride")


@pytest.mark.full
@looped("op, name", TENSORS)
def test_a_tensor_without_host_memory_is_refused(op, name):
    arguments = OPS[op]()
    refuse(op, {**arguments, name: arguments[name].to("meta")}, f"{name}: expected a tensor, got .*meta")
    refuse(op, {**arguments, name: arguments[name].to_sparse()}, f"{name}: expected a tensor, got ")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(arguments[name])
    refuse(op, {**arguments, name: fake}, f"{name}: expected a tensor, got ")


@looped("op, name", TENSORS)
def test_a_tensor_that_requires_grad_is_refused(op, name):
    arguments = OPS[op]()
    if arguments[name].is_floating_point():
        wanting = arguments[name].clone().requires_grad_()
        refuse(op, {**arguments, name: wanting}, f"{name}: expected a tensor, got .*requires grad")
        with torch.inference_mode():
            call(op, {**arguments, name: wanting.detach()})


@looped("op, name", TENSORS)
def test_a_read_only_array_is_refused(op, name):
    array = OPS[op]()[name].numpy()
    array.flags.writeable = False
    refuse(op, {**OPS[op](), name: array}, f"{name}: expected a tensor, got .*readonly")


@pytest.mark.parametrize("op", OPS)
def test_numpy_arrays_are_tensors(op):
    expected, arrays = OPS[op](), OPS[op]()
    arrays.update({name: value.numpy().copy() for name, value in tensors_of(arrays).items()})
    call(op, expected)
    call(op, arrays)
    for name, value in tensors_of(expected).items():
        np.testing.assert_array_equal(arrays[name], value.numpy(), err_msg=name)


def test_objects_with_a_broken_dlpack_method_are_refused():
    class Broken:
        def __dlpack__(self) -> int:
            return 3

    refuse("silu_mul", {**OPS["silu_mul"](), "out": Broken()}, "out: expected a tensor, got ValueError")


# (op, argument, entry, value, message): the entry of the valid argument is replaced.
POSITION_VALUES = [
    ("depths", 0, -1, "depths: row 0"),
    ("depths", 2, 3, "depths: row 2"),
    ("depths", 5, 2**31 - 1, "depths: row 5"),
    ("lengths", 1, 89, "lengths: position 90 is past the 90 rows"),
]
ANCESTOR_VALUES = [
    ("ancestors", (3, 0), 0b1010, r"ancestors: row 3 \(node 3 of request 0\)"),
    ("ancestors", (3, 0), 0b0011, "ancestors: row 3"),
    ("ancestors", (3, 0), 0b11001, "ancestors: row 3"),
    ("ancestors", (5, 0), -(2**31) + 1, r"ancestors: row 5 \(node 0 of request 1\)"),
]
CACHE_VALUES = [
    ("block_table", (0, 0), -1, r"block_table: page -1 of request 0"),
    ("block_table", (0, 1), 2**31 - 1, r"block_table: page \d+ of request 0"),
    ("lengths", 1, -1, "lengths: entry 1 is negative"),
    ("lengths", 0, 2**31 - 1, r"block_table: request 0 needs \d+ pages"),
    ("row_start", 0, 1, "row_start: "),
    ("row_start", 1, -1, "row_start: decreases"),
    ("row_start", 1, 9, "row_start: decreases"),
    ("row_start", 1, -(2**31), "row_start: decreases"),
    ("row_start", 2, 7, "row_start: expected to run from 0 to 8"),
    ("row_start", 2, 2**31 - 1, "row_start: expected to run from 0 to 8"),
]
VALUES = [
    *[("group_pairs", "experts", (1, 1), value, f"experts: entry 3 is {value}, expected 0 to 3") for value in (-1, 4)],
    *[("expert_linear", "rows", 2, value, f"rows: entry 2 is {value}, expected 0 to 5") for value in (-1, 6)],
    *[("expert_linear", "starts", at, value, "starts: ") for at, value in ((0, 1), (1, 6), (2, -1), (4, 5), (4, 7))],
    *[("combine_experts", "places", (2, 0), value, f"places: entry 4 is {value}") for value in (-1, 6)],
    *(("rope_cache", *case) for case in CACHE_VALUES),
    *(("tree_attention", *case) for case in CACHE_VALUES),
    *(("decoder_pass", *case) for case in CACHE_VALUES),
    *[("gather_rows", "ids", 1, value, f"ids: entry 1 is {value}") for value in (-1, 32, 2**31 - 1, -(2**31))],
    *[("gather_rows quantised", "ids", 1, value, f"ids: entry 1 is {value}") for value in (-1, 32)],
    *[("decoder_pass", "tokens", 1, value, f"tokens: entry 1 is {value}") for value in (-1, 32, -(2**31))],
    *((op, *case) for op in ("rope_cache", "decoder_pass") for case in POSITION_VALUES),
    *((op, *case) for op in ("tree_attention", "decoder_pass") for case in ANCESTOR_VALUES),
    ("expand_backbone", "widths", 0, 4, "widths: entry 0"),
    ("expand_backbone", "widths", 2, 0, "widths: entry 2"),
    ("expand_backbone", "thresholds", 0, 0.6, "thresholds: entry 1"),
    ("expand_backbone", "thresholds", 0, torch.nan, "thresholds: entry 0"),
    ("expand_backbone", "logits", (1, 0, 9), torch.nan, r"logits: NaN at \[1, 0, 9\]"),
    ("select_nodes", "scores", (1, 3), torch.nan, "scores: candidate 3 of request 1 has NaN"),
    ("select_nodes", "scores", (0, 0), torch.nan, "scores: candidate 0 of request 0 has NaN"),
    ("select_nodes", "scores", (0, 3), -1.5, "scores: candidate 3 of request 0 has -1.5, expected at most .* -2"),
    (
        "select_nodes",
        "scores",
        (0, 0),
        -torch.inf,
        "scores: candidate 1 of request 0 has -2, expected at most .* -inf",
    ),
    ("select_nodes", "parents", (0, 0), 0, "parents: candidate 0 of request 0 has parent 0, expected -1"),
    *[
        (
            "select_nodes",
            "parents",
            (0, 3),
            value,
            f"parents: candidate 3 of request 0 has parent {value}, expected an",
        )
        for value in (-1, 3, 4, -(2**31), 2**31 - 1)
    ],
    ("select_nodes", "parents", (1, 4), 2, "parents: candidate 4 of request 1 has parent 2, expected an earlier"),
    ("select_nodes", "depths", (1, 0), -1, "parents: candidate 1 of request 1 has parent 0"),
    ("select_nodes", "depths", (1, 0), 1, "depths: candidate 0 of request 1 has depth 1, expected 0"),
    *[
        ("select_nodes", "depths", (0, 4), value, f"depths: candidate 4 of request 0 has depth {value}, expected 2")
        for value in (0, 1, 3, -2, -(2**31), 2**31 - 1)
    ],
    *[(op, "slots", 1, value, "slots: ") for op in ("gated_delta", "compact_states") for value in (-1, 3, 2)],
    *[("gated_delta", "row_start", at, value, "row_start: ") for at, value in ((0, 1), (1, 9), (2, 7), (1, -1))],
    *[("compact_states", "row_start", at, value, "row_start: ") for at, value in ((0, 1), (2, 7), (2, 9))],
    *(("gated_delta", *case) for case in ANCESTOR_VALUES),
    *[("compact_states", "path", at, value, "path: entry") for at, value in (((0, 1), 0), ((0, 2), 5), ((1, 0), -1))],
    *[("compact_states", "path_length", 1, value, "path_length: entry 1") for value in (-1, 4)],
    ("compact_kv", "path", (0, 1), 0, "path: entry"),
    ("compact_kv", "path", (0, 0), -1, "path: entry"),
    ("compact_kv", "path", (0, 2), 1, "path: entry"),
    ("compact_kv", "path", (1, 1), 256, "path: entry"),
    ("compact_kv", "path", (1, 1), 2**31 - 1, "path: entry"),
    ("compact_kv", "path_length", 1, -1, "path_length: entry 1"),
    ("compact_kv", "path_length", 0, 4, "path_length: entry 0"),
    ("compact_kv", "lengths", 0, -1, "lengths: entry 0"),
    ("compact_kv", "lengths", 0, 2**31 - 1, r"block_table: request 0 needs \d+ pages"),
    ("compact_kv", "lengths", 0, 126, "block_table: request 0 needs 3 pages"),
    ("compact_kv", "block_table", (0, 1), 5, "block_table: page 5"),
    ("compact_kv", "block_table", (1, 0), -1, "block_table: page -1"),
    ("verify_tree", "row_start", 0, 1, "row_start: "),
    ("verify_tree", "row_start", 1, 0, "row_start: request 0 has 0 nodes"),
    ("verify_tree", "row_start", 1, 200, "(row_start|path): "),
    ("verify_tree", "row_start", 1, -(2**31), "row_start: "),
    ("verify_tree", "row_start", 2, 9, "row_start: "),
    *[("verify_tree", "tokens", 6, value, "tokens: token") for value in (-1, 20)],
    *[("verify_tree", "history", (1, 0), value, "history: token") for value in (-1, 20)],
    *[("verify_tree", "bias_tokens", 1, value, "bias_tokens: token") for value in (-1, 20)],
    *[("verify_tree", "bias_values", 1, value, "bias_values: entry 1") for value in (torch.nan, torch.inf, -torch.inf)],
    *[("verify_tree", "bias_start", 1, value, "bias_start: ") for value in (-1, 99)],
    ("verify_tree", "bias_start", 0, 1, "bias_start: "),
    ("verify_tree", "bias_start", 2, 4, "bias_start: "),
    ("verify_tree", "parents", 5, 0, "parents: node 0 of request 1 has parent 0, expected -1"),
    *[("verify_tree", "parents", 6, value, "parents: node 1 of request 1") for value in (-1, 1, 2, 2**31 - 1)],
    *[("verify_tree", "history_length", 1, value, "history_length: entry 1") for value in (0, -1, 10**6)],
    *[("verify_tree", "prompt_length", 1, value, "prompt_length: entry 1") for value in (-1, 10**6)],
    *[("verify_tree", "top_p", 0, value, "top_p: entry 0") for value in (0, -1, 1.1, torch.nan)],
    *[("verify_tree", "min_p", 0, value, "min_p: entry 0") for value in (-0.1, 1.1, torch.nan)],
    *[("verify_tree", "temperature", 0, value, "temperature: entry 0") for value in (-1, torch.inf, torch.nan)],
    *[("verify_tree", "repetition_penalty", 0, value, "repetition_penalty: ") for value in (0, -1, torch.nan)],
    *[("verify_tree", "presence_penalty", 0, value, "presence_penalty: ") for value in (torch.inf, torch.nan)],
    *[("verify_tree", "frequency_penalty", 0, value, "frequency_penalty: ") for value in (torch.inf, torch.nan)],
    ("verify_tree", "top_k", 0, -1, "top_k: entry 0"),
]


@pytest.mark.usefixtures("instruction_set")
@looped("op, name, entry, value, message", VALUES)
def test_a_value_out_of_range_is_refused(op, name, entry, value, message):
    arguments = OPS[op]()
    arguments[name][entry] = value
    refuse(op, arguments, message)


CANDIDATES = ("tokens", "parents", "depths", "scores")
NODES = ("out_tokens", "out_parents", "out_depths", "kept")
SELECTION_CHANGES = [
    *(
        (
            {name: torch.zeros(2, count, dtype=OPS["select_nodes"]()[name].dtype) for name in CANDIDATES},
            f"tokens: M={count} candidates, expected 1 to {_C.MAX_CANDIDATES}",
        )
        for count in (0, _C.MAX_CANDIDATES + 1)
    ),
    *(
        (
            {name: torch.zeros(2, count, dtype=torch.int32) for name in NODES}
            | {"ancestors": torch.zeros(2, count, (count + 31) // 32, dtype=torch.int32)},
            f"out_tokens: N={count} nodes, expected 1 to {_C.MAX_NODES}",
        )
        for count in (0, _C.MAX_NODES + 1)
    ),
]
LINEAR_CHANGES = [
    *((op, {"x": quantised(3, 64)}, "x: expected dtype float32, got uint8") for op in ("linear", "linear_argmax")),
    *(
        (f"{op} quantised", {"x": randn(3, 65)}, "x: 65 columns do not match the weight's 2 blocks of 32")
        for op in ("linear", "linear_argmax")
    ),
    *(
        (f"{op} quantised", {"x": quantised(3, 96)}, "x: expected shape .*C/32=2 .from weight.")
        for op in ("linear", "linear_argmax")
    ),
    *(
        (f"{op} quantised", {"weight": blocks(2, 300)}, "weight: blocks of 300 bytes are of no known format")
        for op in ("linear", "linear_argmax")
    ),
]


@pytest.mark.usefixtures("instruction_set")
@looped(
    "op, changes, message",
    [
        ("pack_linear", {"first": -1}, "first: "),
        ("pack_linear", {"first": 28}, "first: 5 rows from 28 on do not fit in 32"),
        ("pack_linear", {"first": 2**63 - 1}, "first: "),
        (
            "pack_linear quantised",
            {"packed": blocks(2, BLOCK_BYTES["q4"])},
            "packed: floats are quantised to blocks of 544",
        ),
        ("pack_linear quantised", {"packed": blocks(2, 300)}, "packed: blocks of 300 bytes are of no known format"),
        (
            "pack_linear quantised",
            {"packed": blocks(3, BLOCK_BYTES["q8"])},
            "packed: expected shape .*C/32=2 .from rows.",
        ),
        ("pack_blocks", {"first": 28}, "first: 5 rows from 28 on do not fit in 32"),
        ("pack_blocks", {"first": -1}, "first: "),
        ("pack_blocks", {"first": 2**63 - 1}, "first: "),
        ("pack_blocks", {"type": "Q6_K"}, "type: expected Q8_0, Q4_0, Q4_1 or Q4_K, got 'Q6_K'"),
        ("pack_blocks", {"type": "Q4_0"}, "rows: 40 bytes are no whole number of Q4_0 blocks"),
        ("pack_blocks", {"packed": blocks(2, BLOCK_BYTES["q4"])}, "packed: expected shape"),
        ("pack_blocks", {"packed": blocks(3, BLOCK_BYTES["q4_min"])}, "packed: expected shape"),
        ("requantise_blocks", {"first": 28}, "first: 5 rows from 28 on do not fit in 32"),
        ("requantise_blocks", {"type": "IQ2_S"}, "type: expected one of Q8_0, .* or Q6_K, got 'IQ2_S'"),
        ("requantise_blocks", {"type": "Q8_0"}, "rows: 44 bytes are no whole number of Q8_0 blocks"),
        (
            "requantise_blocks",
            {"packed": blocks(2, BLOCK_BYTES["q4"])},
            "packed: values are quantised to blocks of 544 ",
        ),
        ("unpack_blocks", {"type": "F32"}, "type: expected one of Q8_0, .* or Q6_K, got 'F32'"),
        ("unpack_blocks", {"type": "Q6_K"}, "rows: 44 bytes are no whole number of Q6_K blocks"),
        ("gather_rows quantised", {"weight": blocks(2, 300)}, "weight: blocks of 300 bytes are of no known format"),
        ("gather_rows quantised", {"out": torch.zeros(3, 65)}, "weight: expected shape .*C/32=3 .from out."),
        *LINEAR_CHANGES,
        ("linear", {"out": torch.zeros(3, 23), "bias": None}, "first: 20 columns from 4 on are not in out's N=23"),
        ("linear", {"first": -1}, "first: "),
        ("linear", {"first": 11}, "first: 20 columns from 11 on are not in out's N=30"),
        ("linear", {"first": 2**63 - 1}, "first: "),
        *[("linear", {"rows": rows, "first": 0}, f"(rows|first): {rows} ") for rows in (-1, 0, 16, 2**63 - 1)],
        *[("linear_argmax", {"rows": rows, "bias": None}, f"rows: {rows} ") for rows in (0, -1, 16, 33, 2**63 - 1)],
        *((op, {"variant": 1}, "variant: expected 0 on cpu, got 1") for op in ("linear", "linear_argmax quantised")),
        *((op, {"weight": randn(20, 6)}, r"weight: expected shape \[P, C.*16\]") for op in ("linear", "linear_argmax")),
        *((op, {"masks": ints(*[[1, 1]] * 3)}, "masks: expected shape") for op in ("linear", "linear_argmax")),
        ("linear_argmax", {"rows": 21}, "bias: expected shape .N. with N=21 .from rows., got .20."),
        ("rms_norm", {"out": torch.zeros(3, 1, 44, dtype=torch.uint8)[:2]}, "out: expected shape"),
        ("rms_norm quantised", {"out": torch.zeros(3, 3, 44, dtype=torch.uint8)}, "out: expected shape"),
        ("silu_mul quantised", {"out": torch.zeros(3, 2, 40, dtype=torch.uint8)}, "out: expected shape"),
        *(
            ("clamped_swiglu", {"limit": limit}, "limit: expected a positive number")
            for limit in (0.0, -1.0, float("nan"))
        ),
        ("rms_norm", {"weight": randn(13)}, r"weight: expected shape \[C=6\] or a multiple, got \[13\]"),
        ("rms_norm", {"place": 2}, "place: expected 0 to 1, got 2"),
        ("rms_norm", {"place": -1}, "place: expected 0 to 1, got -1"),
        ("rope_cache", {"first": 1}, "first: 64 columns from 1 on do not fit into 64"),
        ("rope_cache", {"first": -1}, "first: 64 columns from -1 on do not fit into 64"),
        ("rope_cache", {"cos": randn(90, 5), "sin": randn(90, 5)}, "cos: expected 1 to D/2=4 columns"),
        (
            "rope_cache",
            {"qkv": randn(8, 96), "q_norm": randn(32)},
            "q_norm: expected a norm for each head beside gates",
        ),
        ("gated_delta", {"number": 2}, "number: expected 0 to 1, got 2"),
        ("gated_delta", {"final": True, "records": torch.zeros(1, 8, 72)}, "ancestors: expected None where all rows"),
        (
            "compact_states",
            {"final": True, "records": torch.zeros(1, 8, 72)},
            "states: expected records of every layer",
        ),
        ("compact_states", {"key_heads": 3}, "key_heads: 3 heads of 3 do not match 12 channels of q and k"),
        ("rope_cache", {"block_table": ints([0], [1])}, "block_table: request 0 needs 2 pages"),
        ("tree_attention", {"window": -1}, "window: "),
        ("tree_attention", {"q": randn(8, 3, 8), "out": torch.zeros(8, 3, 8)}, "q: H=3 heads are no multiple of K=2"),
        ("tree_attention", {"q": randn(8, 0, 8), "out": torch.zeros(8, 0, 8)}, "q: H=0"),
        ("tree_attention", {"q": randn(8, 514, 8), "out": torch.zeros(8, 514, 8)}, "q: at most 256 query heads"),
        ("tree_attention", {"ancestors": torch.zeros(8, 0, dtype=torch.int32)}, "ancestors: 0 words cannot hold"),
        (
            "tree_attention",
            {"out": torch.zeros(8, 4, 8, dtype=torch.bfloat16)},
            "out: expected dtype float32 on cpu, got bfloat16",
        ),
        ("expand_backbone", {"root": ints()}, "root: expected shape"),
        *(("select_nodes", changes, message) for changes, message in SELECTION_CHANGES),
        ("decoder_pass", {"workspace": torch.zeros(64, dtype=torch.uint8)}, r"workspace: expected \d+ bytes, got 64"),
        ("decoder_pass", {"cos": randn(90, 3), "sin": randn(90, 3)}, "cos: expected shape .*4"),
        ("decoder_pass", {"cos": randn(61, 4), "sin": randn(61, 4)}, "lengths: position 61 is past the 61 rows of cos"),
        ("decoder_pass", {"block_table": ints([0], [1])}, "block_table: request 0 needs 2 pages"),
        ("decoder_pass", {"ancestors": torch.zeros(8, 0, dtype=torch.int32)}, "ancestors: 0 words cannot hold"),
        ("verify_tree sampled", {"rule": "hope"}, "rule: there is no rule 'hope'"),
        ("verify_tree", {"path": torch.zeros(2, 4, dtype=torch.int32)}, "path: 4 columns cannot hold a path of 5"),
        (
            "verify_tree",  # a wide path must not let the first request reach behind the rows there are
            {"row_start": ints(0, 200, 8), "path": torch.zeros(2, 256, dtype=torch.int32)},
            "row_start: request 1 has -192 nodes",
        ),
        ("verify_tree", {"row_start": ints(0, 1, -(2**31))}, "row_start: "),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(op, changes, message):
    refuse(op, {**OPS[op](), **changes}, message)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    "nodes, words, message", [(257, 9, "row_start: request 0 has 257 nodes"), (33, 1, "ancestors: 1 words")]
)
def test_trees_too_large_for_their_masks_are_refused(nodes, words, message):
    cache = make_cache([comb(nodes)], [3], 1, 8, torch.float32)
    masks = ancestor_bits([comb(nodes)], 9)[:, :words].contiguous()
    arguments = OPS["tree_attention"]() | cache.view()._asdict() | {"ancestors": masks, "sinks": None}
    refuse("tree_attention", {**arguments, "q": randn(nodes, 1, 8), "out": randn(nodes, 1, 8)}, message)


def test_the_message_names_where_an_expected_size_comes_from():
    message = r"out: expected shape \[M, N\] with M=3 \(from x\), got \[4, 30\]"
    refuse("linear", {**OPS["linear"](), "out": torch.zeros(4, 30)}, message)


def test_an_unknown_instruction_set_is_refused():
    before = _C.instruction_set()
    with pytest.raises(ValueError, match=re.escape("name: instruction set 'sse9'")):
        _C.set_instruction_set("sse9")
    assert _C.instruction_set() == before
