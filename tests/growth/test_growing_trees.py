"""Trees that grow level by level by ops, against those that torch grows: the same candidates, and the same rows."""

import random

import pytest
import torch
from specengine.drafters.eagle.expanded_rows import Expanded, own_bits

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.dynamic import DynamicTrees
from specengine.ops.expand_backbone import expand_backbone
from specengine.ops.growth import level_trees
from specengine.ops.growth.level_trees import Cape, GrowingTrees, GrowthPlan, select_limited
from specengine.ops.select_nodes import SelectedTrees, select_nodes
from tests.growth import reference

VOCAB = 40


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def drawn(rows, children, coarse, draw):
    """Random likeliest children; coarse: with many equal scores."""
    scores = [
        sorted((draw.choice((0.0, -0.5)) if coarse else -draw.expovariate(1)) for _ in range(children))[::-1]
        for _ in range(rows)
    ]
    tokens = [draw.sample(range(VOCAB), children) for _ in range(rows)]
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(scores)


def best(backend, tokens, scores):
    return backend.put(tokens), backend.put(scores)


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
        rows = ours.grow(*best(backend, tokens, scores))
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
def test_a_level_has_the_candidates_and_rows_that_torch_gives_it(backend, batch, levels, children, beam, coarse):
    check(backend, batch, levels, children, beam, coarse)


def test_a_request_that_drafts_nothing_has_its_root_alone_and_padding(backend):
    check(backend, 3, 3, 2, 2, idle=(1,))


def test_tokens_may_be_the_target_s_already(backend):
    check(backend, 2, 2, 3, 2, ids=False)


def test_given_entries_are_expanded_instead_of_the_best_ones(backend):
    orders = [backend.put(ints(order)) for order in ([2, 0], [1, 4, 5])]
    plan = GrowthPlan.ordered(1, 3, orders, 1)
    trees = GrowingTrees(plan, *(backend.put(each) for each in (ints([[9]]), ints([1]))), None)
    for count, expected in ((1, [7, 5]), (2, [6, 6, 7]), (3, None)):
        tokens = torch.tensor([[5, 6, 7]] * count, dtype=torch.int32)
        rows = trees.grow(*best(backend, tokens, torch.tensor([[-1.0, -2.0, -3.0]] * count)))
        assert (None if rows is None else rows.tokens.tolist()) == expected
    assert trees.columns[1].tolist() == [[-1, 0, 0, 0, 3, 3, 3, 1, 1, 1, 5, 5, 5, 8, 8, 8, 9, 9, 9]]


def test_a_child_that_does_not_exist_is_no_candidate(backend):
    plan = GrowthPlan.of(1, 1, 2, 1, 1, backend.device)
    one = backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    assert trees.grow(*best(backend, torch.tensor([[4, -1]], dtype=torch.int32), torch.zeros(1, 2))) is None
    assert trees.columns[2].tolist() == [[0, 1, -1]]


def test_nan_among_the_scores_leaves_every_row_of_the_beam_a_place(backend):
    plan = GrowthPlan.of(1, 2, 4, 3, 1, backend.device)
    one = backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    scores = torch.tensor([[float("nan"), -1.0, float("nan"), -2.0]])
    rows = trees.grow(*best(backend, torch.tensor([[4, 5, 6, 7]], dtype=torch.int32), scores))
    assert rows is not None and len({*rows.tokens.tolist()}) == 3


def test_depths_are_limited_by_what_may_be_committed(cuda_backend):
    known, length, final, active = (
        cuda_backend.put(ints(column))
        for column in ([1, 1, 0, 1, 3], [5, 5, 5, 5, 9], [40, 8, 40, 40, 9], [1, 1, 1, 0, 1])
    )
    chain = ints([[*range(7)]] * 5)
    columns = [cuda_backend.put(each) for each in (chain + 20, chain - 1, chain, -chain.float())]
    trees = SelectedTrees.empty(5, 8, cuda_backend.device)
    assert select_limited(columns, known, length, final, active, 4, trees) is trees
    assert trees.node_counts.tolist() == [5, 3, 1, 0, 1]
    expected = SelectedTrees.empty(5, 8, cuda_backend.device)
    select_nodes(*columns, cuda_backend.put(ints([4, 2, 0, -1, 0])), expected)
    for ours, theirs in zip(vars(trees).values(), vars(expected).values(), strict=True):
        assert ours.equal(theirs)
    with pytest.raises(ValueError, match=r"^levels: expected 0 or more, got -1"):
        select_limited(columns, known, length, final, active, -1, trees)


def test_sizes_that_do_not_fit_are_refused(backend):
    plan = GrowthPlan.of(1, 2, 2, 2, 1, backend.device)
    one = backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    short = best(backend, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"^after.beam: 2 rows of 1 candidates"):
        trees.grow(*short)
    wide = best(backend, torch.zeros(1, 9, dtype=torch.int32), torch.zeros(1, 9))
    with pytest.raises(ValueError, match=r"^first: 9 candidates from column 1 on do not fit into columns 1 to 6"):
        trees.grow(*wide)


def test_rows_of_a_request_may_share_their_children(backend):
    plan = GrowthPlan.of(2, 3, 2, 2, 1, backend.device)
    one = backend.put(ints([1, 1]))
    shared, apart = (GrowingTrees(plan, one[:, None].contiguous(), one, None) for _ in range(2))
    for level in range(3):
        tokens = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32) + 10 * level
        scores = torch.tensor([[-1.0, -1.5], [-0.1, -3.0]])
        rows = shared.grow(*best(backend, tokens, scores))
        width = 1 if level == 0 else 2
        apart.grow(*best(backend, *(each.repeat_interleave(width, 0) for each in (tokens, scores))))
        assert rows is None or not rows.in_place
    for ours, theirs in zip(shared.columns, apart.columns, strict=True):
        assert ours.cpu().equal(theirs.cpu())


def test_a_child_of_a_candidate_that_does_not_exist_is_none_either(backend):
    plan = GrowthPlan.of(1, 2, 1, 1, 1, backend.device)
    one = backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    for token in (-1, 5):
        trees.grow(*best(backend, torch.tensor([[token]], dtype=torch.int32), torch.zeros(1, 1)))
    assert trees.columns[2].tolist() == [[0, -1, -1]]


def grown_both_ways(backend, batch, levels, children, beam, vocab, logits_of, *, idle=(), orders=None):
    """Trees of logits in one launch a level, and in two; rows and candidates have to be the same bits."""
    words = -(-(1 + levels * beam) // 32)
    sizes = (batch, levels, children, beam, words, backend.device)
    plan = GrowthPlan.of(*sizes) if orders is None else GrowthPlan.ordered(batch, children, orders, words)
    known = torch.ones(batch, dtype=torch.int32)
    known[list(idle)] = 0
    roots, known = backend.put(torch.arange(batch, dtype=torch.int32)[:, None]), backend.put(known)
    token_ids = backend.put(torch.randperm(vocab, dtype=torch.int32) + 100)
    one, two = (GrowingTrees(plan, roots, known, token_ids) for _ in range(2))
    count = batch
    for level in range(levels):
        logits = backend.put(logits_of(level, count))
        likeliest = expand_backbone(
            logits[:, None], torch.zeros(count, dtype=torch.int32).to(logits.device), [children]
        )
        best = (each[:, 1:].contiguous() for each in (likeliest.tokens, likeliest.scores))
        ours, theirs = one.expand(logits), two.grow(*best)
        if theirs is None:
            break
        for name in ("tokens", "depths", "ancestors"):
            assert getattr(ours, name).equal(getattr(theirs, name)), name
        assert ours.above[ours.depths >= 0].equal(theirs.above[ours.depths >= 0])
        count = len(theirs.tokens)
    assert ours is None
    alive = two.columns[2] >= 0
    for name, found, expected in zip(("tokens", "parents", "depths", "scores"), one.columns, two.columns, strict=True):
        assert torch.where(alive, found, 0).equal(torch.where(alive, expected, 0)), name
    assert one.columns[2].equal(two.columns[2])
    assert not plan.arrived.any()
    return one.columns


@pytest.mark.parametrize(
    "batch, levels, children, beam, vocab",
    [(1, 7, 1, 1, 300), (2, 3, 3, 2, 9000), (3, 3, 4, 4, 50), (1, 2, 20, 20, 40), (2, 2, 2, 2, 20000)],
)
@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
def test_a_level_of_logits_is_that_of_its_likeliest_children(backend, batch, levels, children, beam, vocab, coarse):
    def logits_of(level, rows):
        drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(level)) * 3
        return drawn.round() if coarse else drawn

    grown_both_ways(backend, batch, levels, children, beam, vocab, logits_of)


def test_on_a_gpu_logits_of_an_idle_request_are_not_read_and_no_distribution_is_no_children(cuda_backend):
    def logits_of(level, rows):
        logits = torch.randn(rows, 60, generator=torch.Generator().manual_seed(level))
        if level == 1:
            logits[0, 7] = torch.nan
            logits[5] = -torch.inf
        return logits

    depths = grown_both_ways(cuda_backend, 3, 3, 2, 2, 60, logits_of, idle=(1,))[2].tolist()
    assert depths[0].count(2) == 2 and depths[2].count(2) == 2 and set(depths[1]) == {0, -1}


def test_the_cpu_refuses_logits_without_a_distribution_but_those_of_an_idle_request():
    plan = GrowthPlan.of(2, 1, 2, 2, 1, torch.device("cpu"))
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(1))
    logits[1, 4] = torch.nan
    with pytest.raises(ValueError, match=r"^logits: NaN at \[1, 4\]"):
        GrowingTrees(plan, ints([[3], [4]]), ints([1, 1]), None).expand(logits)
    trees = GrowingTrees(plan, ints([[3], [4]]), ints([1, 0]), None)
    trees.expand(logits)
    assert trees.columns[2].tolist() == [[0, 1, 1], [0, -1, -1]]


@pytest.mark.parametrize("beam", [1, 3])
def test_a_row_has_as_many_children_as_its_class(backend, beam):
    widths, thresholds = [4, 2, 1], [0.3, 0.6]
    cape = Cape.of(widths, thresholds, backend.device)
    one = backend.put(ints([1]))
    trees = GrowingTrees(GrowthPlan.of(1, 2, 4, beam, 1, backend.device), one[:, None].contiguous(), one, None)
    logits = torch.zeros(1 + beam, 6)
    logits[:, 2] = torch.tensor([1.5, 0.0, 4.0, 1.4])[: 1 + beam]  # probabilities 0.47, 0.17, 0.92 and 0.45
    rows = trees.expand(backend.put(logits[:1]), cape=cape)
    assert rows is not None and rows.tokens.tolist() == [2, 0, -1][:beam]  # no row has more than its own children
    assert trees.expand(backend.put(logits[1:]), cape=cape) is None
    depths = trees.columns[2].tolist()[0]
    assert depths == [0, 1, 1, -1, -1, 2, 2, 2, 2, *([2, -1, -1, -1, -1, -1, -1, -1] if beam == 3 else [])]


def test_given_entries_of_a_level_of_logits_are_expanded(backend):
    orders = [backend.put(ints(order)) for order in ([2, 0], [1, 4, 5])]
    drawn = torch.randn(9, 70, generator=torch.Generator().manual_seed(1))
    grown_both_ways(backend, 1, 3, 3, 3, 70, lambda _, rows: drawn[:rows], orders=orders)


@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_a_level_does_not_depend_on_the_order_of_its_blocks(cuda_backend, schedule):
    if cuda_backend.name == "sim":
        level_trees._C.set_schedule(schedule)
    drawn = torch.randn(4, 30000, generator=torch.Generator().manual_seed(2))
    grown_both_ways(cuda_backend, 2, 2, 2, 2, 30000, lambda _, rows: drawn[:rows])


def test_logits_and_room_that_do_not_fit_are_refused(backend):
    plan = GrowthPlan.of(1, 2, 2, 2, 1, backend.device)
    one = backend.put(ints([1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    with pytest.raises(ValueError, match=r"^logits: expected 1 rows or 1, got 2"):
        trees.expand(backend.put(torch.zeros(2, 9)))
    with pytest.raises(ValueError, match=r"^parts.tokens: width 2, expected 1 to Vd=1"):
        trees.expand(backend.put(torch.zeros(1, 1)))


def test_the_first_rows_may_continue_others_than_those_of_their_numbers(backend):
    one, origin = backend.put(ints([1, 1])), backend.put(torch.tensor([4, 9]))
    logits = backend.put(torch.randn(2, 30, generator=torch.Generator().manual_seed(3)))
    for beam, expected in ((1, [4, 9]), (2, [4, 4, 9, 9])):
        plan = GrowthPlan.of(2, 3, beam, beam, 1, backend.device)
        rows = GrowingTrees(plan, one[:, None].contiguous(), one, None, origin).expand(logits)
        assert rows is not None and not rows.in_place and rows.above.tolist() == expected


def test_rows_of_a_request_may_share_logits_to_which_each_adds_its_own(backend):
    put, one = backend.put, backend.put(ints([1, 1]))
    plan = GrowthPlan.of(2, 2, 3, 3, 1, backend.device)
    drawn = torch.Generator().manual_seed(5)
    base, delta = torch.randn(2, 9000, generator=drawn), torch.randn(6, 9000, generator=drawn)
    shared, summed = (GrowingTrees(plan, one[:, None].contiguous(), one, None) for _ in range(2))
    for trees in (shared, summed):
        trees.expand(put(base))
    assert shared.expand(put(base), put(delta)) is None
    assert summed.expand(put(base.repeat_interleave(3, 0) + delta)) is None
    for ours, theirs in zip(shared.columns, summed.columns, strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("each", [False, True], ids=["of a request", "of a row"])
def test_a_confidence_is_the_chance_of_the_first_child(backend, each):
    put, one = backend.put, backend.put(ints([1, 1]))
    plan = GrowthPlan.of(2, 2, 3, 2, 1, backend.device)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(6)) * 2
    logits[3, 7] = 40.0  # as good as certain: the others share what the confidence leaves, and not more
    sure = torch.tensor([0.3, -60.0, 2.0, -0.5] if each else [0.3, -0.5])
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    rows = trees.expand(put(logits[:2]))
    before = trees.columns[3][:, 1:3].flatten().cpu()  # of the best two, in order
    assert rows is not None and trees.expand(put(logits), confidence=put(sure)) is None
    best = expand_backbone(logits[:, None], torch.zeros(4, dtype=torch.int32), [3])
    given = sure if each else sure.repeat_interleave(2)
    expected = reference.confident(best.scores[:, 1:], given.sigmoid())
    found = trees.columns[3][:, 4:].reshape(4, 3).cpu() - before[:, None]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_confidences_that_do_not_fit_are_refused(backend):
    plan = GrowthPlan.of(2, 2, 2, 2, 1, backend.device)
    one = backend.put(ints([1, 1]))
    trees = GrowingTrees(plan, one[:, None].contiguous(), one, None)
    with pytest.raises(ValueError, match=r"^confidence: expected 2 entries or 2, got 3"):
        trees.expand(backend.put(torch.zeros(2, 9)), confidence=backend.put(torch.zeros(3)))
