"""compact_kv against its reference: what moves, and that nothing else does."""

import random

import pytest
import torch

from specengine import _C
from specengine.ops.compact_kv import compact_kv, compact_kv_reference
from tests.ops.cases import CACHE_DTYPES, HEAD_DIMS, PREFIX_LENGTHS


def make_caches(layers, lengths, nodes, kv_heads, dim, dtype, seed=0):
    """(k, v, block_table, lengths) with shuffled pages for every request's prefix and nodes."""
    rng = torch.Generator().manual_seed(seed)
    pages = (max(lengths, default=0) + nodes + 63) // 64
    table = torch.randperm(pages * len(lengths) + 2, generator=rng)[: pages * len(lengths)].int()
    shape = (layers, pages * len(lengths) + 2, kv_heads, 64, dim)
    k, v = torch.randn(shape, generator=rng).to(dtype), torch.randn(shape, generator=rng).to(dtype)
    return k, v, table.view(len(lengths), pages), torch.tensor(lengths, dtype=torch.int32)


def paths_of(paths: list[list[int]], nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [[*path, *[-1] * (nodes - len(path))] for path in paths]
    table = torch.tensor(rows, dtype=torch.int32).reshape(len(paths), nodes)
    return table, torch.tensor([len(path) for path in paths], dtype=torch.int32)


def compacted(backend, k, v, *arguments):
    """Copies of k and v after compaction on the backend."""
    k, v = backend.put(k.clone()), backend.put(v.clone())
    compact_kv(k, v, *(backend.put(argument) for argument in arguments))
    return k.cpu(), v.cpu()


def check(backend, lengths, paths, nodes, *, layers=2, kv_heads=2, dim=8, dtype=torch.float32):
    k, v, table, length = make_caches(layers, lengths, nodes, kv_heads, dim, dtype)
    after = compacted(backend, k, v, table, length, *paths_of(paths, nodes))
    compact_kv_reference(k, v, table, length, *paths_of(paths, nodes))
    assert torch.equal(after[0], k) and torch.equal(after[1], v)


def random_path(nodes: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [0, *sorted(rng.sample(range(1, nodes), rng.randint(0, nodes - 1)))]


def test_the_example_of_the_documentation(backend):
    k, v, table, length = make_caches(1, [10], 6, 1, 8, torch.float32)
    before = k[0, table[0, 0], 0]
    after = compacted(backend, k, v, table, length, *paths_of([[0, 2, 5]], 6))[0][0, table[0, 0], 0]
    assert torch.equal(after[[10, 11, 12]], before[[10, 12, 15]])
    assert torch.equal(after[13:], before[13:]) and torch.equal(after[:10], before[:10])


@pytest.mark.parametrize("length", PREFIX_LENGTHS)
@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 63, 64, 65, 256])
def test_paths_across_page_edges_match_the_reference(backend, length, nodes):
    for seed in range(3):
        check(backend, [length], [random_path(nodes, seed)], nodes)
    check(backend, [length], [[nodes - 1]], nodes)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("layers, kv_heads", [(1, 1), (3, 4)])
def test_every_shape_of_the_cache_matches_the_reference(backend, layers, kv_heads, dim, dtype):
    lengths = [0, 63, 130, 64]
    paths = [random_path(40, seed) for seed in range(4)]
    check(backend, lengths, paths, 40, layers=layers, kv_heads=kv_heads, dim=dim, dtype=dtype)


def test_a_cache_at_an_odd_address_is_compacted_too(backend):
    k, v, table, length = make_caches(2, [62], 40, 2, 8, torch.bfloat16)
    memory = backend.put(torch.zeros(2 * k.numel() + 1, dtype=k.dtype))
    odd = memory[1:].view(2, *k.shape)
    odd[0].copy_(k), odd[1].copy_(v)
    path = paths_of([[0, 3, 17, 39]], 40)
    compact_kv(odd[0], odd[1], *(backend.put(argument) for argument in (table, length, *path)))
    compact_kv_reference(k, v, table, length, *path)
    assert torch.equal(odd[0].cpu(), k) and torch.equal(odd[1].cpu(), v)


@pytest.mark.parametrize("paths", [[[], [], []], [[0], [0], [0]], [list(range(70))] * 3], ids=["none", "root", "all"])
def test_rows_already_in_place_do_not_move(backend, paths):
    k, v, table, length = make_caches(2, [5, 64, 127], 70, 2, 8, torch.bfloat16)
    after = compacted(backend, k, v, table, length, *paths_of(paths, 70))
    assert torch.equal(after[0], k) and torch.equal(after[1], v)


def test_empty_batches_and_empty_models_are_accepted(backend):
    check(backend, [], [], 4)
    check(backend, [7], [[1, 3]], 4, layers=0)


@pytest.mark.usefixtures("instruction_set")
def test_the_number_of_threads_changes_nothing():
    results = []
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        k, v, table, length = make_caches(7, [100, 3], 50, 2, 8, torch.float32)
        compact_kv(k, v, table, length, *paths_of([random_path(50, 1), random_path(50, 2)], 50))
        results.append((k, v))
    for k, v in results[1:]:
        assert torch.equal(k, results[0][0]) and torch.equal(v, results[0][1])
