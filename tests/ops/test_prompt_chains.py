"""PromptChains: long chains become short ones whose prefixes include the earlier rows, once a pass."""

import math

import torch

from specengine._C import MAX_NODES, KVCacheView
from specengine.ops.prefill.chains import Chain, PromptChains
from specengine.ops.tree_attention import chain_bits

STARTS, LENGTHS = [0, 2 * MAX_NODES + 3, 2 * MAX_NODES + 3, 2 * MAX_NODES + 9], [70, 5, 130]
CACHE = torch.empty(0, 1, 64, 8)
TABLE = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)


def view(first_node=0):
    lengths, starts = (torch.tensor(each, dtype=torch.int32) for each in (LENGTHS, STARTS))
    return KVCacheView(CACHE, CACHE, TABLE, lengths, starts, first_node)


def test_a_long_chain_is_divided_and_each_part_sees_the_parts_before_it():
    for first_node in (0, 4):
        short, long = PromptChains.of(STARTS, LENGTHS).divide(view(first_node), math.inf)
        seen = short.view(view())
        assert long == [] and seen.first_node == 0
        assert seen.row_start.tolist() == [0, MAX_NODES, 2 * MAX_NODES, 2 * MAX_NODES + 3, 2 * MAX_NODES + 9]
        assert seen.lengths.tolist() == [
            first_node + length for length in (70, 70 + MAX_NODES, 70 + 2 * MAX_NODES, 130)
        ]
        assert seen.block_table.tolist() == [[1, 2], [1, 2], [1, 2], [5, 6]]
        assert short.ancestors.equal(chain_bits(seen.row_start, STARTS[-1])[:, : MAX_NODES // 32])


def test_masks_are_as_wide_as_the_longest_short_chain():
    for rows, words in ((1, 1), (32, 1), (33, 2), (MAX_NODES, 8), (MAX_NODES + 1, 8)):
        starts = torch.tensor([0, rows], dtype=torch.int32)
        cache = KVCacheView(CACHE, CACHE, TABLE[:1], torch.tensor([9], dtype=torch.int32), starts, 0)
        short, _ = PromptChains.of([0, rows], [9]).divide(cache, math.inf)
        assert short.ancestors.shape == (rows, words) and short.ancestors.is_contiguous()


def test_chains_of_more_pairs_than_a_limit_are_the_librarys():
    chains = PromptChains.of(STARTS, LENGTHS)
    first, last = Chain(0, 0, STARTS[1], 70), Chain(2, STARTS[2], STARTS[3], 130)
    pairs = sum(range(135, 141))  # of the last one's six rows behind four earlier nodes: the keys that each sees
    assert last.pairs(4) == pairs
    for most, long in ((first.pairs(4), []), (pairs, [first]), (pairs - 1, [first, last]), (0, [first, last])):
        division = chains.divide(view(4), most)
        assert division.long == long and (division.short is None) == (len(long) == 2)
        assert chains.divide(view(4), most) is division
        if long == [first]:  # the kernel's results for its rows are not used, so they have no prefix
            assert division.short.lengths.tolist() == [0, 0, 0, 134]


def test_a_pass_without_rows_is_nobodys():
    assert PromptChains.of([0, 0, 0], [3, 4]).divide(view(), math.inf) == (None, [])
