"""tree_attention's CUDA kernels, simulated and on a GPU, against softmax attention over each node's path in float64.

Slots that no node may read hold NaN, and so do outputs and workspaces before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specengine import _C
from specengine.ops import cuda_ops
from specengine.ops import tree_attention as module
from tests.ops.cases import (
    CACHE_DTYPES,
    HEADS,
    NODE_COUNTS,
    PREFIX_LENGTHS,
    Cache,
    Parents,
    ancestor_bits,
    chain,
    comb,
    later_rows,
    make_cache,
    path_to,
    randn,
    random_tree,
    star,
    view_on,
)
from tests.ops.conftest import Backend

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
KERNELS = [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)]  # float32 is strict in any case
ALL_KERNELS = [*KERNELS, (torch.float32, True), (torch.float16, False), (torch.bfloat16, True)]
HEAD_DIMS = (8, 24, 64, 80, 96, 128, 136, 256)
MIXED = ([comb(33), [-1], star(65), random_tree(40, 3), chain(7)], [129, 64, 0, 63, 300])


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills what torch allocates without a value with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


kernels = pytest.mark.parametrize("dtype, strict", KERNELS, ids=str)
all_kernels = pytest.mark.parametrize("dtype, strict", ALL_KERNELS, ids=str)


@dataclass
class Problem:
    """Trees on a cache, each of `width` rows (None: as many as nodes); rows behind a tree are padding."""

    trees: list[Parents]
    lengths: list[int]
    heads: int
    cache: Cache
    q: torch.Tensor
    ancestors: torch.Tensor
    rows: list[tuple[int, int] | None]  # (request, node), None for padding
    sinks: torch.Tensor | None = None

    def arguments(
        self, backend: Backend, strict=False, window=0, out_dtype=torch.float32, first_node=0
    ) -> dict[str, Any]:
        return {
            "q": backend.put(self.q),
            "cache": view_on(backend.put, self.cache.view(first_node)),
            "ancestors": backend.put(self.ancestors),
            "out": backend.put(torch.full_like(self.q, torch.nan, dtype=out_dtype)),
            "scale": self.q.shape[-1] ** -0.5,
            "window": window,
            "strict": strict,
            "sinks": None if self.sinks is None else backend.put(self.sinks),
        }

    def run(self, *args, **options) -> torch.Tensor:
        arguments = self.arguments(*args, **options)
        module.tree_attention(**arguments)
        return arguments["out"].cpu()

    def expected(self, window=0) -> torch.Tensor:
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        group = self.heads // self.cache.k.shape[1]
        for row, place in enumerate(self.rows):
            if place is None:
                continue
            b, node = place
            length = self.lengths[b]
            slots = [*range(length), *(length + i for i in path_to(self.trees[b], node))][-window:]
            keys, values = self.cache.rows(b, length + len(self.trees[b]))
            keys, values = (x[slots].double().repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("hd,shd->hs", self.q[row].double(), keys) * self.q.shape[-1] ** -0.5
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks[:, None].double()], dim=1)
            out[row] = torch.einsum("hs,shd->hd", scores.softmax(dim=1)[:, : len(slots)], values)
        return out


def problem(
    trees,
    lengths,
    heads=4,
    kv_heads=2,
    dim=16,
    dtype=torch.float32,
    width: int | None = None,
    words: int | None = None,
    with_sinks=False,
) -> Problem:
    padded = [tree + star(width)[len(tree) :] if width else tree for tree in trees]
    cache = make_cache(padded, lengths, kv_heads, dim, dtype)
    ancestors = ancestor_bits(padded, words)
    rows = [(b, node) if node < len(trees[b]) else None for b, tree in enumerate(padded) for node in range(len(tree))]
    starts = cache.row_start.tolist()
    for row, place in enumerate(rows):
        if place is None:
            ancestors[row] = 0
            b = next(b for b in range(len(trees)) if row < starts[b + 1])
            slot = lengths[b] + row - starts[b]
            for side in (cache.k, cache.v):
                side[int(cache.block_table[b, slot // 64]), :, slot % 64] = torch.nan
    sinks = 2 * randn(heads, seed=7) if with_sinks else None
    return Problem(trees, lengths, heads, cache, 2 * randn(len(rows), heads, dim, seed=9), ancestors, rows, sinks)


def blocks(sizes, lengths, group=2, **options) -> Problem:
    """Rows that each see their whole block: as if each were its last one."""
    case = problem([chain(size) for size in sizes], lengths, heads=2 * group, **options)
    for row, (b, _) in enumerate(case.rows):
        last = sum(sizes[: b + 1]) - 1
        case.ancestors[row] = case.ancestors[last]
        case.rows[row] = (b, sizes[b] - 1)
    return case


def close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool((out.double() - expected).norm() <= tolerance * expected.norm())


def check(backend: Backend, trees, lengths, dtype, strict, window=0, **sizes) -> None:
    case = problem(trees, lengths, dtype=dtype, **sizes)
    expected, out = case.expected(window), case.run(backend, strict, window)
    assert close(out, expected, TOLERANCE[torch.float32 if strict else dtype])
    padding = [row for row, place in enumerate(case.rows) if place is None]
    assert (out[padding] == 0).all()


@kernels
@pytest.mark.parametrize("nodes", NODE_COUNTS)
def test_every_node_count_matches(cuda_backend, nodes, dtype, strict):
    for shape in (chain, comb) if nodes < 256 else (random_tree,):
        check(cuda_backend, [shape(nodes)], [65], dtype, strict)


@kernels
@pytest.mark.parametrize("length", PREFIX_LENGTHS)
def test_every_prefix_length_matches(cuda_backend, length, dtype, strict):
    check(cuda_backend, [[-1]], [length], dtype, strict)
    check(cuda_backend, [random_tree(37, length)], [length], dtype, strict)


@all_kernels
@pytest.mark.parametrize("heads, kv_heads", [*HEADS, (7, 1), (40, 2)])
def test_requests_of_different_lengths_and_trees_share_a_call(cuda_backend, heads, kv_heads, dtype, strict):
    check(cuda_backend, *MIXED, dtype, strict, heads=heads, kv_heads=kv_heads)


@all_kernels
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim_matches(cuda_backend, dim, dtype, strict):
    check(cuda_backend, [comb(20), random_tree(9)], [100, 3], dtype, strict, dim=dim)
    check(cuda_backend, [comb(3), chain(2)], [100, 30], dtype, strict, dim=dim)  # a small tile


@kernels
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 100, 10**12])
def test_every_sliding_window_matches(cuda_backend, window, dtype, strict):
    check(cuda_backend, *MIXED, dtype, strict, window=window)


@all_kernels
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("sizes, group", [([5, 16], 2), ([33], 8), ([70, 1], 1)])
def test_rows_of_a_block_may_see_the_whole_block(cuda_backend, sizes, group, window, dtype, strict):
    case = blocks(sizes, [130, 62][: len(sizes)], group, dtype=dtype)
    out = case.run(cuda_backend, strict, window)
    assert close(out, case.expected(window), TOLERANCE[torch.float32 if strict else dtype])


@kernels
def test_padding_becomes_zeros_and_its_slots_are_not_read(cuda_backend, dtype, strict):
    check(cuda_backend, [comb(5), [], chain(16), [-1]], [70, 0, 3, 63], dtype, strict, width=16)
    check(cuda_backend, [[-1], [], [-1], []], [200, 64, 0, 0], dtype, strict, width=1)


@kernels
def test_many_short_requests_and_none_with_rows_are_accepted(cuda_backend, dtype, strict):
    check(cuda_backend, [[-1], [], chain(2)] * 23, list(range(69)), dtype, strict, kv_heads=1)
    check(cuda_backend, [[], [], []], [5, 0, 64], dtype, strict)
    check(cuda_backend, [], [], dtype, strict, words=1)


@kernels
@pytest.mark.parametrize("nodes, length", [(5, 2000), (40, 1990), (3, 4500)])
def test_a_long_prefix_is_split(cuda_backend, nodes, length, dtype, strict):
    check(cuda_backend, [comb(nodes), [-1]], [length, 130], dtype, strict, heads=2, kv_heads=1, dim=64)
    check(cuda_backend, [comb(nodes), [-1]], [length, 130], dtype, strict, heads=2, kv_heads=1, window=700)


@pytest.fixture
def multiprocessors(cuda_backend: Backend) -> Iterator[Callable[[int], None]]:
    """Sets the simulated device's number of multiprocessors."""
    yield module._C.set_multiprocessors
    module._C.set_multiprocessors(4)


only_simulated = pytest.mark.parametrize("cuda_backend", [pytest.param("sim", marks=pytest.mark.sim)], indirect=True)


@only_simulated
@pytest.mark.parametrize("nodes", [2, 40])
@pytest.mark.parametrize("count", [1, 3, 16, 1000])
def test_any_number_of_splits_matches(cuda_backend, multiprocessors, count, nodes):
    multiprocessors(count)
    check(cuda_backend, [comb(nodes), chain(3)], [900, 64], torch.bfloat16, strict=False)
    check(cuda_backend, [comb(nodes), chain(3)], [900, 64], torch.float16, strict=False, window=300)


WIDE = ([comb(9), [-1], random_tree(13, 3), [], chain(7)], [129, 64, 0, 30, 330])  # 16 heads: 208 pairs and fewer
half_caches = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@half_caches
@pytest.mark.parametrize("dim", [64, 88, 128, 256])
def test_wide_tiles_match(cuda_backend, dim, dtype):
    """Last tiles are partial, some rows are padding, and windows begin within a step and within a tree."""
    for window in (0, 3, 100):
        check(cuda_backend, *WIDE, dtype, False, window, heads=16, kv_heads=1, dim=dim, width=13, with_sinks=True)
    check(cuda_backend, *WIDE, dtype, False, heads=32, kv_heads=2, dim=dim)


@only_simulated
@half_caches
@pytest.mark.parametrize("count", [1, 5, 1000])
def test_wide_tiles_match_in_any_number_of_splits(cuda_backend, multiprocessors, count, dtype):
    multiprocessors(count)
    check(cuda_backend, [comb(20), chain(3)], [900, 64], dtype, False, heads=16, kv_heads=1, dim=128)


@pytest.fixture
def shared_bytes(cuda_backend: Backend) -> Iterator[Callable[[int], None]]:
    """Sets the shared memory that a block of the simulated device may ask for."""
    yield module._C.set_most_shared_bytes
    module._C.set_most_shared_bytes(227 * 1024)


@only_simulated
@pytest.mark.parametrize("most, wide", [(99 * 1024, False), (163 * 1024, True)])
def test_tiles_fit_the_shared_memory_of_the_device(cuda_backend, shared_bytes, most, wide):
    shared_bytes(most)
    module._C.set_counting(True)
    try:
        check(cuda_backend, [comb(20)], [100], torch.bfloat16, False, heads=16, kv_heads=1, dim=128)
        taken = max(launch["dynamic_shared"] + launch["static_shared"] for launch in module._C.counted())
    finally:
        module._C.set_counting(False)
    assert taken <= most and (taken > 99 * 1024) == wide


@only_simulated
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_the_number_of_multiprocessors_changes_no_bit_in_strict_mode(cuda_backend, multiprocessors, dtype):
    case, outs = problem([comb(5), chain(3)], [900, 64], dtype=dtype), []
    for count in (1, 1000):
        multiprocessors(count)
        outs.append(case.run(cuda_backend, strict=True))
    assert torch.equal(*outs)


@only_simulated
@all_kernels
def test_the_order_in_which_blocks_finish_changes_no_bit(cuda_backend, multiprocessors, dtype, strict):
    multiprocessors(64)
    case, outs = problem([comb(40), [], chain(3)], [900, 300, 64], dtype=dtype, width=40), []
    for seed in range(3):
        module._C.set_schedule(seed)
        outs.append(case.run(cuda_backend, strict))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@all_kernels
def test_launches_in_sequence_share_counters_and_leave_zeros(cuda_backend, dtype, strict):
    arrived = module.arrival_counters(cuda_backend.device)
    for heads, length in ((4, 900), (4, 900), (2, 130)):
        case = problem([comb(5), [-1]], [length, 3], heads, dtype=dtype)
        arguments = case.arguments(cuda_backend, strict)
        module.tree_attention(**arguments, arrived=arrived)
        assert torch.equal(arguments["out"].cpu(), case.run(cuda_backend, strict)) and not arrived.any()


@only_simulated
@kernels
@pytest.mark.parametrize("length", [30, 900])
def test_what_is_read_next_is_prefetched_and_changes_no_bit(cuda_backend, length, dtype, strict):
    case, core = problem([comb(5)], [length], dtype=dtype), module._C
    expected = case.run(cuda_backend, strict)
    for upcoming in (torch.zeros(1, dtype=torch.uint8), torch.zeros(7, 100), torch.zeros(3, 32, 256).bfloat16()):
        before, arguments = core.prefetched_lines(), case.arguments(cuda_backend, strict)
        module.tree_attention(**arguments, upcoming=upcoming)
        assert torch.equal(arguments["out"], expected)
        assert core.prefetched_lines() - before == -(-upcoming.nbytes // 128)


@only_simulated
def test_a_prefetch_is_limited_by_threads_and_by_a_share_of_l2(cuda_backend, multiprocessors):
    core = module._C
    for heads, count, lines in ((2, 1, 2 * 128 * 8), (16, 1000, (50 << 20) // 8 // 128)):  # of 2 blocks, and of 120
        multiprocessors(count)
        case = problem([[-1]], [900], heads, heads // 2, dtype=torch.bfloat16)
        before, upcoming = core.prefetched_lines(), torch.zeros(14 << 20, dtype=torch.uint8)
        module.tree_attention(**case.arguments(cuda_backend), upcoming=upcoming)
        assert core.prefetched_lines() - before == lines


@only_simulated
@pytest.mark.parametrize("value, used", [(None, True), ("1", True), ("0", False)])
def test_the_environment_switches_the_prefetch_off(cuda_backend, monkeypatch, value, used):
    if value is not None:
        monkeypatch.setenv("SPECENGINE_PREFETCH", value)
    arguments = problem([[-1]], [30]).arguments(cuda_backend)
    del arguments["strict"]
    before = module._C.prefetched_lines()
    cuda_ops(cuda_backend.device).layer.tree_attention(**arguments, upcoming=torch.zeros(64))
    assert module._C.prefetched_lines() - before == 2 * used


def test_another_value_of_the_switch_is_refused(monkeypatch):
    monkeypatch.setenv("SPECENGINE_PREFETCH", "no")
    with pytest.raises(ValueError, match="SPECENGINE_PREFETCH: expected 0 or 1, got 'no'"):
        cuda_ops(torch.device("cpu"))


@only_simulated
def test_a_counter_that_is_not_zero_is_found(cuda_backend):
    arguments = problem([comb(5)], [900], dtype=torch.bfloat16).arguments(cuda_backend)
    arrived = module.arrival_counters(cuda_backend.device)
    arrived[0] = 1
    with pytest.raises(RuntimeError, match="simulator: tree_attention: arrived is not zero before the launch"):
        module.tree_attention(**arguments, arrived=arrived)


@all_kernels
@pytest.mark.parametrize("out_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("length", [30, 700])
def test_the_output_may_be_rounded_to_any_float_dtype(cuda_backend, length, out_dtype, dtype, strict):
    case = problem([comb(9)], [length], dtype=dtype)
    exact = case.run(cuda_backend, strict)
    assert torch.equal(case.run(cuda_backend, strict, out_dtype=out_dtype), exact.to(out_dtype))


@kernels
def test_wider_masks_than_needed_change_nothing(cuda_backend, dtype, strict):
    narrow, wide = (problem([comb(20)], [70], dtype=dtype, words=words) for words in (None, 11))
    assert torch.equal(narrow.run(cuda_backend, strict), wide.run(cuda_backend, strict))


@kernels
def test_large_scores_do_not_overflow(cuda_backend, dtype, strict):
    case = problem([comb(9)], [80], dtype=dtype)
    case.q *= 200
    assert close(case.run(cuda_backend, strict), case.expected(), 0.02)


@all_kernels
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_sinks_take_part_in_the_softmax_and_have_no_value(cuda_backend, dim, dtype, strict):
    for trees, lengths, window in (
        ([comb(20), [-1], random_tree(9)], [100, 900, 0], 0),
        ([comb(3), [], [-1]], [700, 5, 30], 500),
    ):
        check(cuda_backend, trees, lengths, dtype, strict, window, dim=dim, width=20, with_sinks=True)


@all_kernels
@pytest.mark.parametrize("length", [30, 900])
def test_a_low_sink_changes_no_bit_and_a_high_one_leaves_zeros(cuda_backend, length, dtype, strict):
    case = problem([comb(9)], [length], dtype=dtype)
    without, case.sinks = case.run(cuda_backend, strict), torch.tensor([-torch.inf, -1000.0, 1000.0, 0.0])
    out = case.run(cuda_backend, strict)
    assert torch.equal(out[:, :2], without[:, :2]) and not out[:, 2].any()
    assert (out[:, 3].abs() < without[:, 3].abs()).all()


PROMPTS = [
    ([chain(300), [], chain(20), chain(520)], [70, 5, 0, 129], 0),
    ([chain(262), chain(9)], [64, 3], 5),
]


@pytest.fixture
def library(monkeypatch) -> list[tuple[int, int]]:
    """Rows and keys of each chain that PyTorch attends to."""
    calls, attend = [], module.causal_attention

    def watched(q, keys, *rest):
        calls.append((len(q), len(keys)))
        return attend(q, keys, *rest)

    monkeypatch.setattr(module, "causal_attention", watched)
    return calls


def check_prompts(backend: Backend, trees, lengths, first_node, dtype, strict, window=0, **sizes) -> None:
    """Checks chains without bits; the rows before first_node were written by an earlier pass."""
    case = problem(trees, lengths, dtype=dtype, **sizes)
    expected, rows = case.expected(window), torch.arange(len(case.q))
    if first_node > 0:
        rows, case.cache.row_start = later_rows(case.cache.row_start, first_node)
        case.q = case.q[rows]
    arguments = case.arguments(backend, strict, window, first_node=first_node) | {"ancestors": None}
    module.tree_attention_cuda(**arguments)
    assert close(arguments["out"].cpu(), expected[rows], TOLERANCE[torch.float32 if strict else dtype])


@pytest.mark.quick(2)
@all_kernels
@pytest.mark.parametrize("window", [0, 100])
def test_prompts_of_any_length_are_read_with_sinks(cuda_backend, library, window, dtype, strict):
    for case in PROMPTS:
        check_prompts(cuda_backend, *case, dtype, strict, window, heads=2, kv_heads=1, with_sinks=True)
    assert library == []


@pytest.mark.quick(2)
@half_caches
@pytest.mark.parametrize("window", [0, pytest.param(100, marks=pytest.mark.full), 300])
def test_prompts_of_any_length_share_one_launch(cuda_backend, library, window, dtype):
    for case in PROMPTS:
        check_prompts(cuda_backend, *case, dtype, False, window, heads=2, kv_heads=1)
    assert library == []


@half_caches
def test_a_chain_with_much_to_multiply_is_the_librarys_and_the_others_stay_the_kernels(
    cuda_backend, library, monkeypatch, dtype
):
    trees, lengths, first_node = PROMPTS[0]
    first = 300 * (70 + 301 / 2) * 2 * 16  # rows, keys on average, heads and columns of the first one
    monkeypatch.setattr(module, "LIBRARY_FROM", first)
    check_prompts(cuda_backend, trees, lengths, first_node, dtype, False, heads=2, kv_heads=1)
    assert library == [(520, 649)]
    check_prompts(cuda_backend, trees, lengths, first_node, dtype, False, window=100, heads=2, kv_heads=1)
    assert library == [(520, 649)]  # over a window PyTorch would compute with float32 and a mask
    monkeypatch.setattr(module, "LIBRARY_FROM", first - 1)
    check_prompts(cuda_backend, trees, lengths, first_node, dtype, False, heads=2, kv_heads=1)
    assert library[1:] == [(300, 370), (520, 649)]


def test_prompts_over_a_float32_cache_are_the_librarys_unless_strict(cuda_backend, library):
    trees, lengths, first_node = PROMPTS[1]
    check_prompts(cuda_backend, trees, lengths, first_node, torch.float32, False)
    assert library == [(257, 326), (4, 12)]
    check_prompts(cuda_backend, trees, lengths, first_node, torch.float32, True)
    assert len(library) == 2


strict_caches = pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
STRICT_SIZES = [(2, 1, 8, 0), (6, 2, 64, 0), (6, 2, 64, 70), (2, 1, 128, 0), (9, 1, 136, 200)]  # H, K, D, window


def moved(case: Problem, in_prefix: bool) -> tuple[Problem, list[int]]:
    """Every node as the last of a request of its own, on a chain or behind a prefix; and where those rows are."""
    trees, lengths, rows, queries = [], [], [], []
    for row, (b, node) in enumerate(case.rows):
        length, path = case.lengths[b], path_to(case.trees[b], node)
        slots = [*range(length), *(length + i for i in path)]
        rows.append([side[slots] for side in case.cache.rows(b, length + len(case.trees[b]))])
        trees.append([-1] if in_prefix else chain(len(path)))
        lengths.append(len(slots) - len(trees[-1]))
        others = [] if in_prefix else [row - node + i for i in path[:-1]]
        queries.append(case.q[[*others, row]])
    _, kv_heads, _, dim = case.cache.k.shape
    cache = make_cache(trees, lengths, kv_heads, dim, case.cache.k.dtype, seed=8, rows=rows)
    places = [(b, node) for b, tree in enumerate(trees) for node in range(len(tree))]
    last = (cache.row_start[1:] - 1).tolist()
    ancestors = ancestor_bits(trees)
    return Problem(trees, lengths, case.heads, cache, torch.cat(queries), ancestors, places, case.sinks), last


with_and_without_sinks = pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])


@strict_caches
@with_and_without_sinks
@pytest.mark.parametrize("heads, kv_heads, dim, window", STRICT_SIZES)
@pytest.mark.parametrize("in_prefix", [False, True], ids=["chain", "prefix"])
def test_a_strict_node_has_the_bits_of_its_path(
    cuda_backend, in_prefix, heads, kv_heads, dim, window, with_sinks, dtype
):
    trees, lengths = [random_tree(24, 4), comb(14), star(3)], [120, 253, 0]
    case = problem(trees, lengths, heads, kv_heads, dim, dtype, with_sinks=with_sinks)
    path, last = moved(case, in_prefix)
    strict = case.run(cuda_backend, True, window)
    assert torch.equal(path.run(cuda_backend, True, window)[last], strict)


def test_without_strict_mode_a_node_may_have_other_bits(cuda_backend):
    case = problem([random_tree(24, 4)], [120], dtype=torch.bfloat16)
    path, last = moved(case, in_prefix=True)
    assert not torch.equal(path.run(cuda_backend)[last], case.run(cuda_backend))


@strict_caches
@with_and_without_sinks
@pytest.mark.parametrize("window", [0, 300])
def test_neither_the_batch_nor_padding_changes_a_bit_in_strict_mode(cuda_backend, window, with_sinks, dtype):
    trees, lengths = [comb(9), [-1], chain(12)], [125, 2500, 0]
    together = problem(trees, lengths, 2, 1, 64, dtype, width=20, with_sinks=with_sinks)
    out, starts = together.run(cuda_backend, True, window), together.cache.row_start.tolist()
    for b, tree in enumerate(trees):
        rows = slice(starts[b], starts[b] + len(tree))
        start, cache = torch.tensor([0, len(tree)], dtype=torch.int32), together.cache
        pages = -(-(lengths[b] + len(tree)) // 64)
        table = cache.block_table[b : b + 1, :pages].contiguous()
        alone = Cache(cache.k, cache.v, table, cache.lengths[b : b + 1], start)
        q, ancestors = together.q[rows], together.ancestors[rows].contiguous()
        case = Problem([tree], [lengths[b]], 2, alone, q, ancestors, [], together.sinks)
        assert torch.equal(case.run(cuda_backend, True, window), out[rows])


@strict_caches
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_nan_reaches_exactly_the_strict_nodes_that_see_it(cuda_backend, side, dtype):
    tree, length, poisoned = random_tree(40, 2), 30, 3
    case = problem([tree], [length], dtype=dtype)
    clean = case.run(cuda_backend, True)
    slot = length + poisoned
    getattr(case.cache, side)[int(case.cache.block_table[0, slot // 64]), 1, slot % 64, 15] = torch.nan
    out = case.run(cuda_backend, True)
    sees = torch.tensor([poisoned in path_to(tree, node) for node in range(40)])
    assert 0 < sees.sum() < 40
    assert torch.equal(out[:, :2], clean[:, :2]), "the other key/value head"
    assert torch.equal(out[~sees], clean[~sees])
    assert out[sees][:, 2:, 15].isnan().all()


@only_simulated
@pytest.mark.parametrize(
    "dim, changes, message",
    [
        (16, {"ancestors": None}, "ancestors: expected the bits of every row on cuda, got None"),
        (16, {"sinks": torch.zeros(3)}, "sinks: expected shape"),
        (20, {}, "k_cache: expected a head dim that is a multiple of 8, at most 256, on cuda, got D=20"),
        (264, {}, "k_cache: expected a head dim"),
        (16, {"workspace": torch.zeros(100)}, r"workspace: expected at least \d+ floats, got 100"),
        (16, {"workspace": None}, r"workspace: expected at least \d+ floats, got 0"),
        (16, {"arrived": torch.zeros(35, dtype=torch.int32)}, "arrived: expected at least 36 counters, got 35"),
        (16, {"arrived": None}, "arrived: expected at least 36 counters, got 0"),
        (16, {"q": torch.zeros(9 * 4 * 16 + 1)[1:].view(9, 4, 16)}, "q: expected memory aligned to 16 bytes"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(cuda_backend, dim, changes, message):
    arguments = problem([comb(9)], [900], dim=dim).arguments(cuda_backend)
    with pytest.raises(ValueError, match=f"^{message}"):
        room = {"workspace": torch.zeros(100_000), "arrived": torch.zeros(36, dtype=torch.int32), "upcoming": None}
        module._C.tree_attention(**{**arguments, **room, **changes})
    assert arguments["out"].isnan().all()


@pytest.mark.quick(2)
@all_kernels
@pytest.mark.parametrize("first_node", [1, 9, 40])
def test_the_later_nodes_alone_are_those_of_the_whole_tree(cuda_backend, first_node, dtype, strict):
    """One of the requests is idle: its rows are padding, and what earlier passes would have written is not there."""
    trees, lengths = [comb(50), [], random_tree(50, 3), chain(49)], [129, 70, 0, 63]
    for heads, kv_heads in ((4, 2), (40, 2)):
        case = problem(trees, lengths, heads, kv_heads, dtype=dtype, width=50)
        expected, whole = case.expected(), case.run(cuda_backend, strict)
        rows, case.cache.row_start = later_rows(case.cache.row_start, first_node)
        case.q, case.ancestors = case.q[rows], case.ancestors[rows]
        out = case.run(cuda_backend, strict, first_node=first_node)
        assert close(out, expected[rows], TOLERANCE[torch.float32 if strict else dtype])
        assert (out[[case.rows[row] is None for row in rows]] == 0).all()
        if strict or dtype == torch.float32:
            assert torch.equal(out, whole[rows])


def test_the_strict_workspace_grows_with_the_logarithm_of_a_long_table(cuda_backend):
    case = problem([[-1]], [5], heads=2, kv_heads=1, dim=8)
    splits = []
    for pages in (2, 4, 32, 96, 224, 3200):
        case.cache.block_table = torch.zeros(1, pages, dtype=torch.int32)
        arguments = case.arguments(cuda_backend, True)
        splits.append(
            module._C.tree_attention_workspace(**arguments, workspace=None, arrived=None, upcoming=None)
            // (2 * (8 + 2))
        )
    assert splits == [0, 2, 16, 32, 48, 106]


def test_the_cpu_needs_no_workspace():
    case = problem([comb(9)], [900])
    arguments = case.arguments(Backend("cpu", torch.device("cpu")))
    assert _C.tree_attention_workspace(**arguments, workspace=None, arrived=None, upcoming=None) == 0
