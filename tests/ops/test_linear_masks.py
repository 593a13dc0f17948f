"""linear and linear_argmax with masks of allowed tokens, against all logits and verify_tree with the same masks."""

import pytest
import torch

from specengine import _C
from specengine.draft_trees.token_masks import mask_words, pack_masks
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.ops.linear import (
    Projection,
    linear,
    linear_argmax,
    linear_argmax_cuda,
    linear_argmax_reference,
    linear_cuda,
)
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.verify_tree import verify_tree
from specengine.ops.weight import Weight
from specengine.types import SamplingParams
from tests.ops.cases import randn
from tests.ops.packing import CPU, FORMATS, packed

every_instruction_set = pytest.mark.usefixtures("wide_instruction_set")
every_format = pytest.mark.parametrize("form", FORMATS)


def likeliest_allowed(logits: torch.Tensor, allowed: torch.Tensor) -> list[int]:
    """The tokens that greedy verification takes from roots with these masks; -1 where it refuses the row."""
    found = []
    for row, mask in zip(logits, allowed, strict=True):
        tree = TreeBatch.of([DraftTree([0], [-1])], CPU)
        history = TokenHistory.of([[0]], [1], 4)
        table = SamplingTable.of([SamplingParams()], [0])
        try:
            accepted = verify_tree(row[None], tree, table, history, masks=pack_masks(mask[None]))
        except ValueError:
            found.append(-1)
        else:
            found.append(int(accepted.bonus[0]))
    return found


def masks_of(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows that allow nearly all, half, a few, one, none and all of the tokens, in turn; bool [rows, vocab]."""
    draws = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed))
    chances = torch.tensor([0.97, 0.5, 3 / vocab, 0.0, 0.0, 1.0])[torch.arange(rows) % 6]
    allowed = draws < chances[:, None]
    allowed[3::6] = False
    allowed[range(3, rows, 6), draws[3::6].argmax(1)] = True
    return allowed


@every_instruction_set
@every_format
@pytest.mark.parametrize("vocab", [16, 33, 300])
def test_the_likeliest_allowed_token_is_that_of_verify_tree_with_masks(form, vocab):
    """Also where the scores that are forbidden, or allowed, are no numbers."""
    refused = 0
    for m in (1, 13):
        layer = Projection((packed(randn(vocab, 40, seed=m), form),), randn(vocab, seed=m + 1))
        x, allowed = randn(m, 40, seed=m + 2), masks_of(m, vocab, m)
        for bad in (None, torch.nan, torch.inf, -torch.inf):
            if bad is not None:
                layer.bias[:: vocab // 5 + 1] = bad
            expected = likeliest_allowed(linear(x, layer), allowed)
            assert linear_argmax(x, layer, pack_masks(allowed)).tolist() == expected
            refused += expected.count(-1)
    assert refused > 0, "rows that allow nothing are among them"


@every_instruction_set
@every_format
def test_masks_of_ones_change_nothing_and_bits_past_the_last_token_have_no_meaning(form):
    for vocab in (16, 33, 300):
        layer, x = Projection((packed(randn(vocab, 40), form),), None), randn(9, 40)
        ones = torch.full((9, mask_words(vocab)), -1, dtype=torch.int32)
        assert linear_argmax(x, layer, ones).tolist() == linear_argmax(x, layer).tolist()
        if vocab % 32:
            ones[:, :-1] = 0
            ones[:, -1] = -1 << vocab % 32
            assert linear_argmax(x, layer, ones).tolist() == [-1] * 9


@every_instruction_set
@pytest.mark.parametrize("threads", [1, 3])
def test_ties_go_to_the_lower_allowed_id(threads):
    _C.set_num_threads(threads)
    layer, x = Projection((packed(torch.zeros(1000, 8), "float32"),), torch.zeros(1000)), torch.ones(2, 8)
    layer.bias[7] = 1.0
    allowed = torch.zeros(2, 1000, dtype=torch.bool)
    allowed[0, [999, 640, 41]] = True
    allowed[1, [500, 7]] = True
    assert linear_argmax(x, layer, pack_masks(allowed)).tolist() == [41, 7]


def test_the_reference_takes_masks_too():
    weight, bias, x = randn(45, 8), randn(45, seed=5), randn(12, 8, seed=6)
    allowed = masks_of(12, 45, 3)
    layer = Projection((Weight(weight, 45, "float32"),), bias)
    expected = likeliest_allowed(x @ weight.T + bias, allowed)
    assert linear_argmax_reference(x, layer, pack_masks(allowed)).tolist() == expected


@every_instruction_set
@every_format
def test_allowed_entries_have_their_bits_and_panels_that_no_row_allows_are_zero(form):
    for vocab in (1, 33, 300):
        layer, x = Projection((packed(randn(vocab, 40), form),), randn(vocab, seed=3)), randn(13, 40)
        allowed, whole = masks_of(13, vocab, 1), linear(x, layer)
        for rows in (slice(0, 13), slice(2, 4), slice(4, 5)):
            torch.full((rows.stop - rows.start, vocab), torch.nan)  # freed, so that the result may lie in its memory
            some = linear(x[rows], layer, pack_masks(allowed[rows]))
            assert torch.equal(some[allowed[rows]], whole[rows][allowed[rows]])
        assert not some.any(), "the last row allows nothing, so no panel of it is computed"


def test_masks_of_several_weights_are_refused():
    part, mask = packed(randn(16, 8), "float32"), torch.full((1, 1), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^masks: expected None for a layer of 2 weights, got a tensor"):
        linear(randn(1, 8), Projection((part, part), None), mask)


@pytest.mark.parametrize("op", [linear_cuda, linear_argmax_cuda])
def test_masks_are_refused_on_cuda(op):
    layer, masks = Projection((Weight(randn(4, 8), 4, "float32"),), None), pack_masks(torch.ones(1, 4).bool())
    with pytest.raises(ValueError, match=r"^masks: expected None on cuda, got a tensor"):
        op(randn(1, 8), layer, None, masks)
