"""tree_attention's CUDA kernels, simulated and on a GPU, against softmax attention over each node's path in float64.

Slots that no node may read hold NaN, and so do outputs and workspaces before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

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
    make_cache,
    path_to,
    randn,
    random_tree,
    star,
)
from tests.ops.conftest import Backend

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
KERNELS = [(dtype, strict) for dtype in CACHE_DTYPES for strict in (False, True)][1:]  # float32 is always strict
HALF_KERNELS = [(torch.bfloat16, False), (torch.float16, False)]
HEAD_DIMS = (8, 24, 64, 80, 96, 128, 136, 256)
MIXED = ([comb(33), [-1], star(65), random_tree(40, 3), chain(7)], [129, 64, 0, 63, 300])



@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills what torch allocates without a value with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


kernels = pytest.mark.parametrize("dtype, strict", KERNELS, ids=str)


@dataclass
class Problem:
    """Trees on a cache, each of `width` rows (None: as many as nodes); rows behind a tree are padding."""

    trees: list[Parents]
    lengths: list[int]
    heads: int
    cache: Cache
    q: torch.Tensor
    ancestors: torch.Tensor
    rows: list[tuple[int, int] | None]  # (sequence, node), None for padding

    def arguments(self, backend: Backend, strict=False, window=0, out_dtype=torch.float32) -> tuple:
        poison = torch.full_like(self.q, torch.nan, dtype=out_dtype)
        tensors = (backend.put(t) for t in (self.q, *self.cache.place(), self.ancestors, poison))
        return (*tensors, self.q.shape[-1] ** -0.5, window, strict)

    def run(self, *args, **options) -> torch.Tensor:
        arguments = self.arguments(*args, **options)
        module.tree_attention(*arguments)
        return arguments[7].cpu()

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
            out[row] = torch.einsum("hs,shd->hd", scores.softmax(dim=1), values)
        return out


def problem(
    trees, lengths, heads=4, kv_heads=2, dim=16, dtype=torch.float32, width: int | None = None, words: int | None = None
) -> Problem:
    padded = [tree + [0] * ((width or len(tree)) - len(tree)) for tree in trees]
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
    return Problem(trees, lengths, heads, cache, 2 * randn(len(rows), heads, dim, seed=9), ancestors, rows)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def check(backend: Backend, trees, lengths, dtype, strict, window=0, **sizes) -> None:
    case = problem(trees, lengths, dtype=dtype, **sizes)
    expected, out = case.expected(window), case.run(backend, strict, window)
    assert error_of(out, expected) <= TOLERANCE[torch.float32 if strict else dtype]
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


@kernels
@pytest.mark.parametrize("heads, kv_heads", [*HEADS, (7, 1), (40, 2)])
def test_sequences_of_different_lengths_and_trees_share_a_call(cuda_backend, heads, kv_heads, dtype, strict):
    check(cuda_backend, *MIXED, dtype, strict, heads=heads, kv_heads=kv_heads)


@kernels
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim_matches(cuda_backend, dim, dtype, strict):
    check(cuda_backend, [comb(20), random_tree(9)], [100, 3], dtype, strict, dim=dim)
    check(cuda_backend, [comb(3), chain(2)], [100, 30], dtype, strict, dim=dim)  # a small tile


@kernels
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 100, 10**12])
def test_every_sliding_window_matches(cuda_backend, window, dtype, strict):
    check(cuda_backend, *MIXED, dtype, strict, window=window)


@kernels
def test_padding_becomes_zeros_and_its_slots_are_not_read(cuda_backend, dtype, strict):
    check(cuda_backend, [comb(5), [], chain(16), [-1]], [70, 0, 3, 63], dtype, strict, width=16)
    check(cuda_backend, [[-1], [], [-1], []], [200, 64, 0, 0], dtype, strict, width=1)


@kernels
def test_many_short_sequences_and_none_with_rows_are_accepted(cuda_backend, dtype, strict):
    check(cuda_backend, [[-1], [], chain(2)] * 23, list(range(69)), dtype, strict, kv_heads=1)
    check(cuda_backend, [[], [], []], [5, 0, 64], dtype, strict)
    check(cuda_backend, [], [], dtype, strict)


@kernels
@pytest.mark.parametrize("nodes, length", [(5, 2000), (70, 1990), (3, 4500)])
def test_a_long_prefix_is_split(cuda_backend, nodes, length, dtype, strict):
    check(cuda_backend, [comb(nodes), [-1]], [length, 130], dtype, strict, heads=2, kv_heads=1, dim=64)
    check(cuda_backend, [comb(nodes), [-1]], [length, 130], dtype, strict, heads=2, kv_heads=1, window=700)


@pytest.fixture
def multiprocessors(cuda_backend: Backend) -> Iterator[Callable[[int], None]]:
    """Sets the simulated device's number of multiprocessors."""
    yield module._C.set_multiprocessors
    module._C.set_multiprocessors(132)


only_simulated = pytest.mark.parametrize("cuda_backend", [pytest.param("sim", marks=pytest.mark.sim)], indirect=True)


@only_simulated
@pytest.mark.parametrize("nodes", [2, 40])
@pytest.mark.parametrize("count", [1, 3, 16, 1000])
def test_any_number_of_splits_matches(cuda_backend, multiprocessors, count, nodes):
    multiprocessors(count)
    check(cuda_backend, [comb(nodes), chain(3)], [900, 64], torch.bfloat16, strict=False)
    check(cuda_backend, [comb(nodes), chain(3)], [900, 64], torch.float16, strict=False, window=300)


@only_simulated
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_the_number_of_multiprocessors_changes_no_bit_in_strict_mode(cuda_backend, multiprocessors, dtype):
    case, outs = problem([comb(5), chain(3)], [900, 64], dtype=dtype), []
    for count in (1, 1000):
        multiprocessors(count)
        outs.append(case.run(cuda_backend, strict=True))
    assert torch.equal(*outs)


@kernels
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
    assert error_of(case.run(cuda_backend, strict), case.expected()) < 0.02


def bits_of(backend: Backend, trees, lengths, dtype, cache_rows=None, window=0, **sizes) -> torch.Tensor:
    pass


def decoded(case: Problem, backend: Backend, window: int, alone: bool) -> torch.Tensor:
    """Every node by plain decoding: its own sequence, its path's rows consecutive behind the prefix, one query."""


