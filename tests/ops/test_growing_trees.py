"""Trees that grow inside captured cycles, against those that torch grows: the same candidates, and the same rows."""

import dataclasses
import random

import pytest
import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.dynamic import DynamicTrees
from specengine.drafters.eagle.expanded_rows import Expanded, own_bits
from specengine.ops.growth.level_trees import GrowingTrees, GrowthPlan, limit_depths

VOCAB = 40


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


@dataclasses.dataclass
class Best:
    """What an expander says: the root's column is not read."""

    tokens: torch.Tensor
    scores: torch.Tensor


def drawn(rows, children, coarse, draw):
    """Random likeliest children; coarse: with many equal scores."""
    scores = [
        sorted((draw.choice((0.0, -0.5)) if coarse else -draw.expovariate(1)) for _ in range(children))[::-1]
        for _ in range(rows)
    ]
    tokens = [draw.sample(range(VOCAB), children) for _ in range(rows)]
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(scores)


def best(backend, tokens, scores):
    columns = [torch.cat([torch.full_like(each[:, :1], 77), each], 1) for each in (tokens, scores)]
    return Best(*map(backend.put, columns))


def check(backend, batch, levels, children, beam, coarse=False, ids=True, idle=()):
    draw = random.Random(levels * children + beam)
    token_ids = torch.randperm(VOCAB, dtype=torch.int32) + 100 if ids else None
    roots, known = torch.arange(batch, dtype=torch.int32)[:, None], torch.ones(batch, dtype=torch.int32)
    known[list(idle)] = 0
    nodes = own_bits(1 + (levels - 1) * beam)
    plan = GrowthPlan.of(batch, levels, children, beam, nodes.shape[1], backend.device)
    tables = None if token_ids is None else backend.put(token_ids)
    ours = GrowingTrees(plan, backend.put(roots), backend.put(known), tables)
    lengths = torch.zeros(batch, dtype=torch.int32)
    laid, trees, rows = Expanded(CacheBatch(lengths, lengths), nodes), None, None
    running, above = known > 0, None
    for level in range(levels):
        tokens, scores = drawn(batch if rows is None else len(rows.tokens), children, coarse, draw)
        mapped = tokens if token_ids is None else token_ids[tokens.long()]
        if trees is None:
            trees = DynamicTrees(mapped, scores, beam)
            above = torch.zeros_like(trees.beam)
        else:
            above = trees.grow(*(each.view(*trees.beam.shape, -1) for each in (mapped, scores)))
        rows = ours.grow(best(backend, tokens, scores))
        if level == levels - 1:
            break
        assert rows is not None and rows.first_node == laid.count
        wanted = laid.add(trees.opened, above)
        alive = running.repeat_interleave(above.shape[1])
        assert rows.tokens.cpu().equal(torch.where(alive, wanted.tokens, -1))
        assert rows.depths.cpu().equal(torch.where(alive, wanted.depths, -1))
        assert rows.ancestors.cpu().equal(torch.where(alive[:, None], wanted.ancestors, 0))
        assert rows.row_start.cpu().equal(wanted.row_start)
        width = 1 if level == 0 else plan.widths[level - 1]
        assert rows.above.view(above.shape).cpu().equal(above + width * torch.arange(batch)[:, None])
    assert rows is None
    tokens, parents, depths, scores = trees.rooted(roots)
    depths[:, 1:] = torch.where(running[:, None], depths[:, 1:], -1)
    for found, expected in zip(ours.columns, (tokens, parents, depths, scores), strict=True):
        assert found.cpu().equal(expected)


@pytest.mark.parametrize(
    "batch, levels, children, beam",
    [(1, 7, 1, 1), (2, 3, 3, 1), (3, 3, 4, 4), (1, 1, 5, 5), (2, 2, 20, 20), (1, 12, 4, 4)],
)
@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
def test_a_level_has_the_candidates_and_rows_that_torch_gives_it(cuda_backend, batch, levels, children, beam, coarse):
    check(cuda_backend, batch, levels, children, beam, coarse)


def test_a_request_that_drafts_nothing_has_its_root_alone_and_padding(cuda_backend):
    check(cuda_backend, 3, 3, 2, 2, idle=(1,))


def test_tokens_may_be_the_target_s_already(cuda_backend):
    check(cuda_backend, 2, 2, 3, 2, ids=False)


def test_given_entries_are_expanded_instead_of_the_best_ones(cuda_backend):
    orders = [cuda_backend.put(ints(order)) for order in ([2, 0], [1, 4, 5])]
    plan = GrowthPlan.ordered(1, 3, orders, 1)
    trees = GrowingTrees(plan, *(cuda_backend.put(each) for each in (ints([[9]]), ints([1]))), None)
    for count, expected in ((1, [7, 5]), (2, [6, 6, 7]), (3, None)):
        tokens = torch.tensor([[5, 6, 7]] * count, dtype=torch.int32)
        rows = trees.grow(best(cuda_backend, tokens, torch.tensor([[-1.0, -2.0, -3.0]] * count)))
        assert (None if rows is None else rows.tokens.tolist()) == expected
    assert trees.columns[1].tolist() == [[-1, 0, 0, 0, 3, 3, 3, 1, 1, 1, 5, 5, 5, 8, 8, 8, 9, 9, 9]]


def test_a_child_that_does_not_exist_is_no_candidate(cuda_backend):
    plan = GrowthPlan.of(1, 1, 2, 1, 1, cuda_backend.device)
    one = cuda_backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    assert trees.grow(best(cuda_backend, torch.tensor([[4, -1]], dtype=torch.int32), torch.zeros(1, 2))) is None
    assert trees.columns[2].tolist() == [[0, 1, -1]]


def test_nan_among_the_scores_leaves_every_row_of_the_beam_a_place(cuda_backend):
    plan = GrowthPlan.of(1, 2, 4, 3, 1, cuda_backend.device)
    one = cuda_backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    scores = torch.tensor([[float("nan"), -1.0, float("nan"), -2.0]])
    rows = trees.grow(best(cuda_backend, torch.tensor([[4, 5, 6, 7]], dtype=torch.int32), scores))
    assert rows is not None and len({*rows.tokens.tolist()}) == 3


def test_depths_are_limited_by_what_may_be_committed(cuda_backend):
    known, length, final, active = (
        cuda_backend.put(ints(column))
        for column in ([1, 1, 0, 1, 3], [5, 5, 5, 5, 9], [40, 8, 40, 40, 9], [1, 1, 1, 0, 1])
    )
    assert limit_depths(known, length, final, active, 4).tolist() == [4, 2, 0, -1, 0]


def test_sizes_that_do_not_fit_are_refused(cuda_backend):
    plan = GrowthPlan.of(1, 2, 2, 2, 1, cuda_backend.device)
    one = cuda_backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    short = best(cuda_backend, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"^after.beam: 2 rows of 1 candidates"):
        trees.grow(short)
    with pytest.raises(ValueError, match=r"^levels: expected 0 or more, got -1"):
        limit_depths(one, one, one, one, -1)
    wide = best(cuda_backend, torch.zeros(1, 9, dtype=torch.int32), torch.zeros(1, 9))
    with pytest.raises(ValueError, match=r"^first: 9 candidates from column 1 on do not fit into columns 1 to 6"):
        trees.grow(wide)


def test_rows_of_a_request_may_share_their_children(cuda_backend):
    plan = GrowthPlan.of(2, 3, 2, 2, 1, cuda_backend.device)
    one = cuda_backend.put(ints([1, 1]))
    shared, apart = (GrowingTrees(plan, one[:, None].contiguous(), one, None) for _ in range(2))
    for level in range(3):
        tokens = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32) + 10 * level
        scores = torch.tensor([[-1.0, -1.5], [-0.1, -3.0]])
        rows = shared.grow(best(cuda_backend, tokens, scores))
        width = 1 if level == 0 else 2
        apart.grow(best(cuda_backend, *(each.repeat_interleave(width, 0) for each in (tokens, scores))))
        assert rows is None or not rows.in_place
    for ours, theirs in zip(shared.columns, apart.columns, strict=True):
        assert ours.cpu().equal(theirs.cpu())


def test_a_child_of_a_candidate_that_does_not_exist_is_none_either(cuda_backend):
    plan = GrowthPlan.of(1, 2, 1, 1, 1, cuda_backend.device)
    one = cuda_backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    for token in (-1, 5):
        trees.grow(best(cuda_backend, torch.tensor([[token]], dtype=torch.int32), torch.zeros(1, 1)))
    assert trees.columns[2].tolist() == [[0, -1, -1]]
