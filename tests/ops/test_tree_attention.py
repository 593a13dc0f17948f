"""tree_attention against its reference, and bit for bit against plain decoding of the same tokens."""

import pytest
import torch

from specengine import _C
from specengine.ops.tree_attention import tree_attention, tree_attention_reference
from tests.ops.cases import (
    CACHE_DTYPES,
    HEAD_DIMS,
    HEADS,
    NODE_COUNTS,
    PREFIX_LENGTHS,
    Cache,
    ancestor_bits,
    chain,
    comb,
    depths_of,
    later_rows,
    make_cache,
    path_to,
    randn,
    random_tree,
    star,
)

pytestmark = pytest.mark.usefixtures("wide_instruction_set")

MIXED = ([comb(33), [-1], star(65), random_tree(40, 3), chain(7)], [129, 64, 0, 63, 300])


def attend(
    cache: Cache, q: torch.Tensor, ancestors: torch.Tensor | None, window: int = 0, op=tree_attention, **more
) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    op(q, cache.view(), ancestors, out, q.shape[-1] ** -0.5, window, **more)
    return out


def queries(cache: Cache, heads: int) -> torch.Tensor:
    return 2 * randn(int(cache.row_start[-1]), heads, cache.k.shape[-1], seed=9)


def check(trees, lengths, heads=4, kv_heads=2, dim=16, dtype=torch.float32, window=0):
    cache = make_cache(trees, lengths, kv_heads, dim, dtype)
    q, ancestors = queries(cache, heads), ancestor_bits(trees)
    expected = attend(cache, q, ancestors, window, tree_attention_reference)
    torch.testing.assert_close(attend(cache, q, ancestors, window), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("nodes", NODE_COUNTS)
def test_every_node_count_matches_the_reference(nodes, dtype):
    for shape in (chain, star, comb, random_tree):
        check([shape(nodes)], [65], dtype=dtype)


@pytest.mark.parametrize("length", PREFIX_LENGTHS)
def test_every_prefix_length_matches_the_reference(length):
    check([random_tree(1)], [length])
    check([random_tree(37, length)], [length], dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_every_head_grouping_matches_the_reference(heads, kv_heads, dtype):
    check(*MIXED, heads=heads, kv_heads=kv_heads, dtype=dtype)


@pytest.mark.parametrize("group", [5, 7, 50, 256])
def test_groups_of_any_size_match_the_reference(group):
    check([comb(9), chain(3)], [70, 3], heads=2 * group, kv_heads=2, dim=8)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim_matches_the_reference(dim, dtype):
    check([comb(20), random_tree(9)], [100, 3], dim=dim, dtype=dtype)


@pytest.mark.parametrize("window", [1, 2, 3, 16, 63, 64, 65, 100, 10**12])
def test_every_sliding_window_matches_the_reference(window):
    check(*MIXED, window=window)


def test_an_empty_batch_and_requests_without_rows_are_accepted():
    cache = make_cache([], [], 2, 8, torch.float32)
    assert attend(cache, queries(cache, 4), None).shape == (0, 4, 8)
    trees, lengths = [comb(5), [], star(3)], [10, 7, 0]
    cache = make_cache(trees, lengths, 2, 8, torch.float32)
    expected = attend(cache, queries(cache, 4), ancestor_bits(trees), op=tree_attention_reference)
    torch.testing.assert_close(attend(cache, queries(cache, 4), ancestor_bits(trees)), expected)


@pytest.mark.parametrize("window", [0, 50])
def test_no_ancestors_means_the_chain_bit_for_bit(window):
    trees = [chain(70), chain(1), chain(256)]
    cache = make_cache(trees, [3, 64, 127], 2, 20, torch.float32)
    q = queries(cache, 6)
    assert torch.equal(attend(cache, q, None, window), attend(cache, q, ancestor_bits(trees), window))


def test_wider_masks_than_needed_change_nothing():
    trees = [comb(20)]
    cache = make_cache(trees, [70], 2, 8, torch.float32)
    q = queries(cache, 4)
    assert torch.equal(attend(cache, q, ancestor_bits(trees)), attend(cache, q, ancestor_bits(trees, words=11)))


@pytest.mark.parametrize("window", [0, 1, 70])
def test_a_chain_longer_than_any_tree_is_prefill(window):
    cache = make_cache([chain(400), chain(3)], [0, 130], 2, 16, torch.float32)
    q = queries(cache, 4)
    expected = attend(cache, q, None, window, tree_attention_reference)
    torch.testing.assert_close(attend(cache, q, None, window), expected, rtol=1e-4, atol=2e-5)


def decoded(cache: Cache, trees, lengths, q: torch.Tensor, window: int, **more) -> torch.Tensor:
    """Every node by plain decoding: its own request, its path's rows consecutive behind the prefix, one query."""
    own, rows = [], []
    for b, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        keys, values = cache.rows(b, length + len(tree))
        for node in range(len(tree)):
            path = path_to(tree, node)
            slots = [*range(length), *(length + i for i in path)]
            own.append(length + len(path) - 1)
            rows.append((keys[slots], values[slots]))
    _, kv_heads, _, dim = cache.k.shape
    plain = make_cache([[-1]] * len(own), own, kv_heads, dim, cache.k.dtype, seed=8, rows=rows)
    return attend(plain, q, None, window, **more)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 8), (6, 2, 20), (4, 1, 64), (8, 2, 96)])
@pytest.mark.parametrize("window", [0, 70])
def test_a_node_has_the_bits_of_the_same_token_in_plain_decoding(heads, kv_heads, dim, dtype, window):
    trees, lengths = [random_tree(65, 4), comb(30), star(5)], [62, 129, 0]
    cache = make_cache(trees, lengths, kv_heads, dim, dtype)
    q = queries(cache, heads)
    assert torch.equal(attend(cache, q, ancestor_bits(trees), window), decoded(cache, trees, lengths, q, window))


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim", [(3, 3, 8), (6, 2, 20), (9, 3, 64), (7, 1, 72)])
@pytest.mark.parametrize("window", [0, 1, 50])
def test_a_token_has_the_same_bits_in_prefill_and_in_decoding(heads, kv_heads, dim, dtype, window):
    trees, lengths = [chain(140), chain(2), chain(65)], [0, 63, 130]
    cache = make_cache(trees, lengths, kv_heads, dim, dtype)
    q = queries(cache, heads)
    assert torch.equal(attend(cache, q, None, window), decoded(cache, trees, lengths, q, window))


@pytest.mark.parametrize("window", [0, 3, 64])
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_sinks_are_those_of_the_reference_and_keep_the_bits_of_plain_decoding(heads, kv_heads, window):
    trees, lengths = MIXED
    cache, sinks = make_cache(trees, lengths, kv_heads, 16, torch.float32), 3 * randn(heads, seed=5)
    q, ancestors = queries(cache, heads), ancestor_bits(trees)
    found = attend(cache, q, ancestors, window, sinks=sinks)
    expected = attend(cache, q, ancestors, window, tree_attention_reference, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert torch.equal(found, decoded(cache, trees, lengths, q, window, sinks=sinks))
    rows = [chain(170), chain(3)]
    prompts = make_cache(rows, [0, 130], kv_heads, 16, torch.float32)
    q = queries(prompts, heads)
    found = attend(prompts, q, None, window, sinks=sinks)
    expected = attend(prompts, q, None, window, tree_attention_reference, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert torch.equal(found, decoded(prompts, rows, [0, 130], q, window, sinks=sinks))


def test_a_sink_is_a_score_without_a_value():
    cache = make_cache([comb(9)], [80], 2, 8, torch.float32)
    q, ancestors = queries(cache, 4), ancestor_bits([comb(9)])
    without = attend(cache, q, ancestors)
    found = attend(cache, q, ancestors, sinks=torch.tensor([-torch.inf, -1000.0, 1000.0, 0.0]))
    assert torch.equal(found[:, :2], without[:, :2]) and not found[:, 2].any()
    smaller = found[:, 3] / without[:, 3]
    assert (smaller < 1).all() and (smaller > 0).all()
    torch.testing.assert_close(smaller, smaller[:, :1].expand_as(smaller), rtol=1e-4, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, 33, 100])
def test_a_prompt_in_pieces_of_any_size_has_the_bits_of_the_whole(rows):
    cache = make_cache([chain(150)], [70], 2, 20, torch.float32)
    q = queries(cache, 6)
    whole = attend(cache, q, None)
    for first in range(0, 150, rows):
        piece = q[first : first + rows].contiguous()
        start = torch.tensor([0, len(piece)], dtype=torch.int32)
        part = Cache(cache.k, cache.v, cache.block_table, cache.lengths + first, start)
        assert torch.equal(attend(part, piece, None), whole[first : first + rows])


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_neither_batch_nor_threads_change_a_bit(dtype):
    trees, lengths = MIXED
    cache = make_cache(trees, lengths, 2, 20, dtype)
    q, ancestors, starts = queries(cache, 6), ancestor_bits(trees), cache.row_start.tolist()
    _C.set_num_threads(1)
    together = attend(cache, q, ancestors)
    for threads in (2, 3, 16):
        _C.set_num_threads(threads)
        assert torch.equal(attend(cache, q, ancestors), together)
    for b, tree in enumerate(trees):
        rows = slice(starts[b], starts[b + 1])
        start = torch.tensor([0, len(tree)], dtype=torch.int32)
        alone = Cache(cache.k, cache.v, cache.block_table[b : b + 1], cache.lengths[b : b + 1], start)
        assert torch.equal(attend(alone, q[rows], ancestors[rows].contiguous()), together[rows])


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_nan_in_the_cache_reaches_exactly_the_nodes_that_see_it(which):
    tree, length = random_tree(40, 2), 30
    cache = make_cache([tree], [length], 2, 20, torch.float32)
    q, ancestors = queries(cache, 4), ancestor_bits([tree])
    clean = attend(cache, q, ancestors)
    poisoned = 3
    slot = length + poisoned
    getattr(cache, which)[int(cache.block_table[0, slot // 64]), 1, slot % 64, 19] = torch.nan
    out = attend(cache, q, ancestors)
    sees = torch.tensor([poisoned in path_to(tree, node) for node in range(40)])
    assert 0 < sees.sum() < 40
    assert torch.equal(out[:, :2], clean[:, :2]), "the other key/value head"
    assert torch.equal(out[~sees], clean[~sees])
    assert out[sees][:, 2:, 19].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("window", [0, 40])
def test_what_a_slot_holds_does_not_change_the_rows_of_a_prompt_that_do_not_see_it(window, which, value):
    rows, length, slot = 90, 30, 77
    cache = make_cache([chain(rows)], [length], 2, 20, torch.float32)
    q = queries(cache, 6)
    clean = attend(cache, q, None, window)
    getattr(cache, which)[int(cache.block_table[0, slot // 64]), 1, slot % 64, :] = value
    out = attend(cache, q, None, window)
    position = length + torch.arange(rows)
    sees = (position >= slot) & (position - slot < (window or rows))
    assert torch.equal(out[:, :3], clean[:, :3]), "the other key/value head"
    assert torch.equal(out[~sees], clean[~sees])
    assert 0 < sees.sum() < rows and (out[sees] != clean[sees])[:, 3:].any(dim=(1, 2)).all()


def test_a_nan_query_makes_its_head_nan_and_no_other():
    cache = make_cache([comb(20)], [70], 2, 20, torch.bfloat16)
    q, ancestors = queries(cache, 4), ancestor_bits([comb(20)])
    clean = attend(cache, q, ancestors)
    q[7, 2, 5] = torch.nan
    out = attend(cache, q, ancestors)
    assert out[7, 2].isnan().all()
    clean[7, 2] = torch.nan
    assert torch.equal(out.isnan(), clean.isnan()) and torch.equal(out.nan_to_num(), clean.nan_to_num())


def test_large_scores_do_not_overflow():
    cache = make_cache([comb(9)], [80], 1, 8, torch.float32)
    q = 1000 * queries(cache, 2)
    ancestors = ancestor_bits([comb(9)])
    expected = attend(cache, q, ancestors, op=tree_attention_reference)
    torch.testing.assert_close(attend(cache, q, ancestors), expected, rtol=1e-3, atol=1e-3)


def test_ancestors_in_the_cases_agree_with_depths():
    bits = ancestor_bits([random_tree(65)])
    counts = torch.stack([(bits >> i) & 1 for i in range(32)]).sum(dim=(0, 2))
    assert torch.equal(counts - 1, depths_of([random_tree(65)]))


@pytest.mark.parametrize("window", [0, 5, 70])
@pytest.mark.parametrize("first_node", [1, 7, 40])
def test_the_later_nodes_alone_have_the_bits_of_the_whole_tree(first_node, window):
    trees, lengths = [comb(50), random_tree(41, 3), chain(64)], [129, 0, 63]
    cache = make_cache(trees, lengths, 2, 16, torch.float32)
    q, ancestors = queries(cache, 4), ancestor_bits(trees)
    whole = attend(cache, q, ancestors, window)
    rows, cache.row_start = later_rows(cache.row_start, first_node)
    out, expected = (torch.full_like(q[rows], torch.nan) for _ in range(2))
    arguments = (q[rows], cache.view(first_node), ancestors[rows])
    tree_attention(*arguments, out, 0.25, window)
    assert torch.equal(out, whole[rows])
    tree_attention_reference(*arguments, expected, 0.25, window)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


def test_a_chain_behind_earlier_nodes_needs_no_bits():
    trees, lengths = [chain(9), chain(70)], [60, 3]
    cache = make_cache(trees, lengths, 2, 16, torch.float32)
    q = queries(cache, 4)
    whole = attend(cache, q, None)
    rows, cache.row_start = later_rows(cache.row_start, 6)
    for op in (tree_attention, tree_attention_reference):
        out = torch.full_like(q[rows], torch.nan)
        op(q[rows], cache.view(first_node=6), None, out, 0.25, 0)
        torch.testing.assert_close(out, whole[rows], rtol=1e-4, atol=2e-5)


def test_no_more_earlier_nodes_are_taken_than_a_tree_may_have():
    cache = make_cache([[-1]], [5], 2, 16, torch.float32)
    for first_node in (-1, 256):
        with pytest.raises(ValueError, match=f"^first_node: expected 0 to 255 nodes, got {first_node}"):
            q = queries(cache, 4)
            tree_attention(q, cache.view(first_node), ancestor_bits([[-1]]), q.clone(), 0.25, 0)
