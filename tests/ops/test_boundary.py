"""What crosses into C++: every op refuses every bad argument by name, and writes nothing when it does."""

import inspect
import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specengine import _C
from tests.ops.arguments import (
    OPS,
    OPTIONAL,
    TENSORS,
    Arguments,
    ancestor_bits,
    comb,
    ints,
    make_cache,
    randn,
    tensors_of,
)

NOT_OPS = {"num_threads", "set_num_threads", "instruction_set", "set_instruction_set"}


def refuse(op: str, arguments: Arguments, message: str) -> None:
    """Expects a ValueError that matches `message` and unchanged tensors."""
    real = {name: value for name, value in tensors_of(arguments).items() if type(value) is torch.Tensor}
    before = {n: t.detach().clone() for n, t in real.items() if t.device.type == "cpu" and not t.is_sparse}
    with pytest.raises(ValueError, match=f"^{message}") as error:
        getattr(_C, op)(**arguments)
    assert "\n" not in str(error.value)
    for name, tensor in before.items():
        torch.testing.assert_close(arguments[name], tensor, rtol=0, atol=0, equal_nan=True, msg=f"{name} was written")


def test_the_table_covers_every_op():
    functions = {name for name, value in inspect.getmembers(_C) if callable(value) and not name.startswith("_")}
    assert functions - NOT_OPS == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_valid_arguments_are_accepted_and_change_only_outputs(op):
    arguments = OPS[op]()
    before = {name: value.clone() for name, value in tensors_of(arguments).items()}
    getattr(_C, op)(**arguments)
    written = {name for name, value in before.items() if not torch.allclose(value, arguments[name], equal_nan=True)}
    outputs = {"packed", "out", "residual", "q", "k_cache", "v_cache", "tokens", "parents", "depths", "scores"}
    outputs |= {"ancestors", "node_counts", "top_tokens", "top_scores", "path", "path_length", "bonus"}
    assert written and written <= outputs
    if op in ("tree_attention", "verify_tree"):
        assert written <= {"out", "path", "path_length", "bonus", "scores"}


@pytest.mark.parametrize("op, name", TENSORS)
def test_what_is_no_tensor_is_refused(op, name):
    for value in (3, "text", [1.0], object()):
        refuse(op, {**OPS[op](), name: value}, f"{name}: expected a tensor, got {type(value).__name__}")
    if (op, name) in OPTIONAL:
        getattr(_C, op)(**{**OPS[op](), name: None})
    else:
        refuse(op, {**OPS[op](), name: None}, f"{name}: expected a tensor, got None")


@pytest.mark.parametrize("op, name", TENSORS)
def test_a_wrong_dtype_is_refused(op, name):
    arguments = OPS[op]()
    taken = [arguments[name].dtype]
    if (op, name) != ("rms_norm", "weight") and name in ("weight", "k_cache", "packed", "rows"):
        taken += [torch.bfloat16, torch.float16][: 2 if name in ("rows", "k_cache") else 1]
    expected = str(taken[0]).removeprefix("torch.")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool):
        if dtype not in taken:
            refuse(op, {**arguments, name: arguments[name].to(dtype)}, f"{name}: expected dtype {expected}")


@pytest.mark.parametrize("op, name", TENSORS)
def test_a_wrong_number_of_dimensions_is_refused(op, name):
    arguments = OPS[op]()
    value = arguments[name]
    refuse(op, {**arguments, name: value[None]}, rf"{name}: expected shape \[.*\].*, got \[1, ")
    refuse(op, {**arguments, name: value[0]}, rf"{name}: expected shape \[.*\].*, got \[")
    deep = value.reshape(*[1] * 7, *value.shape)
    refuse(op, {**arguments, name: deep}, f"{name}: expected a tensor, got a tensor of more than 6 dimensions")


GROWS = {  # sizes that are free: larger than needed is fine
    *(("pack_linear", "packed", 0), ("pack_linear", "rows", 0), ("gather_rows", "weight", 0)),
    *((op, "block_table", 1) for op in ("rope_cache", "tree_attention", "compact_kv")),
    *(("verify_tree", "history", 1), ("verify_tree", "path", 1), ("compact_kv", "path", 1)),
    *(("tree_attention", "ancestors", 1), ("expand_backbone", "logits", 2)),
}


@pytest.mark.parametrize("op, name", TENSORS)
def test_a_wrong_size_is_refused_by_the_argument_or_the_one_it_disagrees_with(op, name):
    arguments = OPS[op]()
    for dim in range(arguments[name].ndim):
        shape = list(arguments[name].shape)
        shape[dim] += 1
        larger = arguments[name].new_zeros(shape)
        larger[tuple(map(slice, arguments[name].shape))] = arguments[name]
        if (op, name, dim) in GROWS:
            getattr(_C, op)(**{**arguments, name: larger})
        else:
            refuse(op, {**arguments, name: larger}, f"({'|'.join(arguments)}): ")


@pytest.mark.parametrize("op, name", TENSORS)
def test_a_strided_tensor_is_refused(op, name):
    arguments = OPS[op]()
    strided = torch.stack([arguments[name]] * 2, dim=-1)[..., 0]
    refuse(op, {**arguments, name: strided}, f"{name}: expected a contiguous tensor, got stride")


@pytest.mark.parametrize("op, name", TENSORS)
def test_a_tensor_without_host_memory_is_refused(op, name):
    arguments = OPS[op]()
    refuse(op, {**arguments, name: arguments[name].to("meta")}, f"{name}: expected a tensor, got .*meta")
    refuse(op, {**arguments, name: arguments[name].to_sparse()}, f"{name}: expected a tensor, got ")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(arguments[name])
    refuse(op, {**arguments, name: fake}, f"{name}: expected a tensor, got ")


@pytest.mark.parametrize("op, name", TENSORS)
def test_a_tensor_that_requires_grad_is_refused(op, name):
    arguments = OPS[op]()
    if arguments[name].is_floating_point():
        wanting = arguments[name].clone().requires_grad_()
        refuse(op, {**arguments, name: wanting}, f"{name}: expected a tensor, got .*requires grad")
        with torch.inference_mode():
            getattr(_C, op)(**{**arguments, name: wanting.detach()})


@pytest.mark.parametrize("op, name", TENSORS)
def test_a_read_only_array_is_refused(op, name):
    array = OPS[op]()[name].numpy()
    array.flags.writeable = False
    refuse(op, {**OPS[op](), name: array}, f"{name}: expected a tensor, got .*readonly")


@pytest.mark.parametrize("op", OPS)
def test_numpy_arrays_are_tensors(op):
    expected, arrays = OPS[op](), OPS[op]()
    arrays.update({name: value.numpy().copy() for name, value in tensors_of(arrays).items()})
    getattr(_C, op)(**expected)
    getattr(_C, op)(**arrays)
    for name, value in tensors_of(expected).items():
        np.testing.assert_array_equal(arrays[name], value.numpy(), err_msg=name)


def test_objects_with_a_broken_dlpack_method_are_refused():
    class Broken:
        def __dlpack__(self) -> int:
            return 3

    refuse("silu_mul", {**OPS["silu_mul"](), "out": Broken()}, "out: expected a tensor, got ValueError")


# (op, argument, entry, value, message): the entry of the valid argument is replaced.
CACHE_VALUES = [
    ("block_table", (0, 0), -1, r"block_table: page -1 of sequence 0"),
    ("block_table", (0, 1), 2**31 - 1, r"block_table: page \d+ of sequence 0"),
    ("lengths", 1, -1, "lengths: entry 1 is negative"),
    ("lengths", 0, 2**31 - 1, r"block_table: sequence 0 needs \d+ pages"),
    ("row_start", 0, 1, "row_start: "),
    ("row_start", 1, -1, "row_start: decreases"),
    ("row_start", 1, 9, "row_start: decreases"),
    ("row_start", 1, -(2**31), "row_start: decreases"),
    ("row_start", 2, 7, "row_start: expected to run from 0 to 8"),
    ("row_start", 2, 2**31 - 1, "row_start: expected to run from 0 to 8"),
]
VALUES = [
    *(("rope_cache", *case) for case in CACHE_VALUES),
    *(("tree_attention", *case) for case in CACHE_VALUES),
    *[("gather_rows", "ids", 1, value, f"ids: entry 1 is {value}") for value in (-1, 32, 2**31 - 1, -(2**31))],
    ("rope_cache", "depths", 0, -1, "depths: row 0"),
    ("rope_cache", "depths", 2, 3, "depths: row 2"),
    ("rope_cache", "depths", 5, 2**31 - 1, "depths: row 5"),
    ("rope_cache", "lengths", 1, 89, "lengths: position 90 is past the 90 rows"),
    ("tree_attention", "ancestors", (3, 0), 0b1010, r"ancestors: row 3 \(node 3 of sequence 0\)"),
    ("tree_attention", "ancestors", (3, 0), 0b0011, "ancestors: row 3"),
    ("tree_attention", "ancestors", (3, 0), 0b11001, "ancestors: row 3"),
    ("tree_attention", "ancestors", (5, 0), -(2**31) + 1, r"ancestors: row 5 \(node 0 of sequence 1\)"),
    ("expand_backbone", "widths", 0, 4, "widths: entry 0"),
    ("expand_backbone", "widths", 2, 0, "widths: entry 2"),
    ("expand_backbone", "thresholds", 0, 0.6, "thresholds: entry 1"),
    ("expand_backbone", "thresholds", 0, torch.nan, "thresholds: entry 0"),
    ("expand_backbone", "logits", (1, 0, 9), torch.nan, r"logits: NaN at \[1, 0, 9\]"),
    ("compact_kv", "path", (0, 1), 0, "path: entry"),
    ("compact_kv", "path", (0, 0), -1, "path: entry"),
    ("compact_kv", "path", (0, 2), 1, "path: entry"),
    ("compact_kv", "path", (1, 1), 256, "path: entry"),
    ("compact_kv", "path", (1, 1), 2**31 - 1, "path: entry"),
    ("compact_kv", "path_length", 1, -1, "path_length: entry 1"),
    ("compact_kv", "path_length", 0, 4, "path_length: entry 0"),
    ("compact_kv", "lengths", 0, -1, "lengths: entry 0"),
    ("compact_kv", "lengths", 0, 2**31 - 1, r"block_table: sequence 0 needs \d+ pages"),
    ("compact_kv", "lengths", 0, 126, "block_table: sequence 0 needs 3 pages"),
    ("compact_kv", "block_table", (0, 1), 5, "block_table: page 5"),
    ("compact_kv", "block_table", (1, 0), -1, "block_table: page -1"),
    ("verify_tree", "row_start", 0, 1, "row_start: "),
    ("verify_tree", "row_start", 1, 0, "row_start: sequence 0 has 0 nodes"),
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
    ("verify_tree", "parents", 5, 0, "parents: node 0 of sequence 1 has parent 0, expected -1"),
    *[("verify_tree", "parents", 6, value, "parents: node 1 of sequence 1") for value in (-1, 1, 2, 2**31 - 1)],
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
@pytest.mark.parametrize("op, name, entry, value, message", VALUES)
def test_a_value_out_of_range_is_refused(op, name, entry, value, message):
    arguments = OPS[op]()
    arguments[name][entry] = value
    refuse(op, arguments, message)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    "op, changes, message",
    [
        ("pack_linear", {"first": -1}, "first: "),
        ("pack_linear", {"first": 28}, "first: 5 rows from 28 on do not fit in 32"),
        ("pack_linear", {"first": 2**63 - 1}, "first: "),
        ("linear", {"out": torch.zeros(3, 16), "bias": None}, "out: N=16 columns do not match 2 panels"),
        ("linear", {"out": torch.zeros(3, 33), "bias": None}, "out: N=33 columns do not match 2 panels"),
        ("rope_cache", {"cos": randn(90, 3), "sin": randn(90, 3)}, "cos: expected D/2=4 columns"),
        ("rope_cache", {"block_table": ints([0], [1])}, "block_table: sequence 0 needs 2 pages"),
        ("tree_attention", {"window": -1}, "window: "),
        ("tree_attention", {"q": randn(8, 3, 8), "out": torch.zeros(8, 3, 8)}, "q: H=3 heads are no multiple of K=2"),
        ("tree_attention", {"q": randn(8, 0, 8), "out": torch.zeros(8, 0, 8)}, "q: H=0"),
        ("tree_attention", {"q": randn(8, 514, 8), "out": torch.zeros(8, 514, 8)}, "q: at most 256 query heads"),
        ("tree_attention", {"ancestors": torch.zeros(8, 0, dtype=torch.int32)}, "ancestors: 0 words cannot hold"),
        ("expand_backbone", {"root": ints()}, "root: expected shape"),
        ("verify_tree", {"path": torch.zeros(2, 4, dtype=torch.int32)}, "path: 4 columns cannot hold a path of 5"),
        (
            "verify_tree",  # a wide path must not let the first sequence reach behind the rows there are
            {"row_start": ints(0, 200, 8), "path": torch.zeros(2, 256, dtype=torch.int32)},
            "row_start: sequence 1 has -192 nodes",
        ),
        ("verify_tree", {"row_start": ints(0, 1, -(2**31))}, "row_start: "),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(op, changes, message):
    refuse(op, {**OPS[op](), **changes}, message)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    "nodes, words, message", [(257, 9, "row_start: sequence 0 has 257 nodes"), (33, 1, "ancestors: 1 words")]
)
def test_trees_too_large_for_their_masks_are_refused(nodes, words, message):
    cache = make_cache([comb(nodes)], [3], 1, 8, torch.float32)
    names = ("k_cache", "v_cache", "block_table", "lengths", "row_start")
    masks = ancestor_bits([comb(nodes)], 9)[:, :words].contiguous()
    arguments = dict(zip(names, cache.place(), strict=True)) | {"ancestors": masks, "scale": 1.0, "window": 0}
    refuse("tree_attention", {"q": randn(nodes, 1, 8), "out": randn(nodes, 1, 8), **arguments}, message)


def test_the_message_names_where_an_expected_size_comes_from():
    message = r"out: expected shape \[M, N\] with M=3 \(from x\), got \[4, 20\]"
    refuse("linear", {**OPS["linear"](), "out": torch.zeros(4, 20)}, message)


def test_an_unknown_instruction_set_is_refused():
    before = _C.instruction_set()
    with pytest.raises(ValueError, match=re.escape("name: instruction set 'sse9'")):
        _C.set_instruction_set("sse9")
    assert _C.instruction_set() == before
