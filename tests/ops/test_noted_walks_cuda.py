"""Walks with notes on CUDA: blocks share a row and a walk, and no number of them shows in the result."""

import pytest
import torch

from specengine.draft_trees.tree import DraftLogits
from specengine.rules import parse_rule
from tests.ops.cases import chain, comb, randn
from tests.ops.rule_cases import RULES, Case, assert_equal, on_cpu, random_case, run
from tests.ops.verifying import PARAMS, make_batch

SHARING = (2, 7, 132)  # multiprocessors


def share(simulated, backend, multiprocessors: int) -> None:
    if backend.name == "sim":
        simulated.set_multiprocessors(multiprocessors)


@pytest.mark.quick(4)
@pytest.mark.parametrize("spec", RULES)
def test_blocks_that_share_a_walk_decide_as_the_cpu(simulated, cuda_backend, spec):
    rule, refused = parse_rule(spec), 0
    for seed, multiprocessors in enumerate(SHARING):
        case = random_case(seed, 1, 1400, spec == "block")
        case.batch.logits += randn(*case.batch.logits.shape, seed=seed + 50)  # some children are refused
        share(simulated, cuda_backend, multiprocessors)
        found = run(cuda_backend, case, rule)
        assert_equal(found, on_cpu(case, rule))
        refused += int(found.path_length[0]) < len(case.batch.tree.tokens)
    assert refused > 0


@pytest.mark.parametrize("spec", ["rejection", "traversal", "lossy:alpha=0.3,beta=0.8", "cascade:token-v3,alpha=0.5"])
@pytest.mark.parametrize("replacement", [False, True])
def test_more_refusals_than_launches_that_share_them(simulated, cuda_backend, spec, replacement):
    rule, vocab = parse_rule(spec), 700
    batch = make_batch([comb(24, 8)], [PARAMS["plain"]], vocab)
    batch.tree.tokens.copy_(torch.arange(24))
    batch.logits.zero_()
    batch.logits[:, 30] = 20  # no child's token
    draft = randn(24, vocab, seed=4)
    draft[:, :24] += 6
    rows = torch.full((24,), -1, dtype=torch.int32)
    parents = batch.tree.parents[1:].unique()
    rows[parents.long()] = parents
    case = Case(batch, DraftLogits(draft, rows, None, replacement))
    share(simulated, cuda_backend, 5)
    found = run(cuda_backend, case, rule)
    assert_equal(found, on_cpu(case, rule))
    assert found.path_length[0] < 4


HEAVY = ("rejection", "traversal", "typical:epsilon=0.2,delta=0.4", "margin:theta=0.5,mode=reference")


@pytest.mark.parametrize("spec", [*HEAVY, "cascade:opt,alpha=0.2", "cascade:token-v3,alpha=0.5"])
@pytest.mark.parametrize("place", [3, 700, 2040])
def test_a_part_with_most_of_the_weight_decides(simulated, cuda_backend, spec, place):
    """A note, a sum or a draw that missed the part of `place` would accept the second child or give another token."""
    rule, vocab = parse_rule(spec), 2048  # 16 groups of tokens: no part is empty
    batch = make_batch([[-1, 0, 0]], [PARAMS["plain"]], vocab)
    batch.tree.tokens.copy_(torch.tensor([1, 10, 20]))
    batch.logits.fill_(-20)
    batch.logits[:, 10], batch.logits[:, 20], batch.logits[:, place] = -6, -2.8, -0.1
    draft = torch.full((1, vocab), -20.0)
    draft[0, 10], draft[0, 20], draft[0, 50] = -0.1, -3.2, -3.0
    case = Case(batch, DraftLogits(draft, torch.tensor([0, -1, -1], dtype=torch.int32), None, False))
    share(simulated, cuda_backend, 132)
    tokens = []
    for seed in range(4):
        batch.params.seed.fill_(seed)
        found = run(cuda_backend, case, rule)
        assert_equal(found, on_cpu(case, rule))
        tokens.append(int(found.bonus[0]))
    assert place in tokens


@pytest.mark.parametrize("place", [3, 700, 2040])
def test_a_sum_that_is_known_before_the_walk_has_every_part(simulated, cuda_backend, place):
    """Without the part of `place` the two distributions seem near: the rule would not trust the drafter."""
    rule, vocab = parse_rule("cascade:opt,alpha=0.2"), 2048
    batch = make_batch([[-1, 0]], [PARAMS["plain"]], vocab)
    batch.tree.tokens.copy_(torch.tensor([1, 20]))
    target, draft = (torch.full((rows, vocab), 1e-9) for rows in (2, 1))
    target[:, 10], target[:, 20], target[:, 50] = 0.7, 0.01, 0.29
    draft[:, place], draft[:, 20], draft[:, 10] = 0.6, 0.3, 0.1
    batch.logits.copy_(target.log())
    case = Case(batch, DraftLogits(draft.log(), torch.tensor([0, -1], dtype=torch.int32), None, False))
    share(simulated, cuda_backend, 132)
    for seed in range(4):
        batch.params.seed.fill_(seed)
        found = run(cuda_backend, case, rule)
        assert_equal(found, on_cpu(case, rule))
        assert found.path_length[0] == 2  # a trusted drafter's child is followed


def test_many_requests_beside_each_other_have_walks_of_their_own(simulated, cuda_backend):
    case, rule = random_case(5, 6, 1400, False), parse_rule("rejection")
    share(simulated, cuda_backend, 40)
    assert_equal(run(cuda_backend, case, rule), on_cpu(case, rule))


@pytest.mark.parametrize("spec", ["typical:epsilon=0.2,delta=0.4", "margin:theta=0.5,mode=strict"])
def test_a_leaf_without_a_distribution_gives_no_bonus_token(cuda_backend, spec):
    """No one notes a leaf before the walk, so the draw has to find out."""
    batch = make_batch([chain(2)], [PARAMS["plain"]], 300)
    batch.tree.tokens.copy_(torch.tensor([5, 6]))
    batch.logits[0, 6], batch.logits[1, 200] = 60, torch.nan
    found = run(
        cuda_backend, Case(batch, DraftLogits(randn(2, 300), torch.zeros(2, dtype=torch.int32) - 1)), parse_rule(spec)
    )
    assert found.path[0].tolist() == [0, 1] and found.bonus[0] == -1


@pytest.mark.sim
def test_no_order_of_threads_and_blocks_shows_in_a_shared_walk(simulated, cuda_backend):
    case, rule = random_case(3, 2, 700, False), parse_rule("traversal")
    expected = on_cpu(case, rule)
    for seed in range(3):
        simulated.set_schedule(seed)
        simulated.set_multiprocessors(10)
        assert_equal(run(cuda_backend, case, rule), expected)


@pytest.mark.sim
def test_merged_parts_are_the_row_and_a_missing_part_or_a_wrong_order_shows(simulated):
    rows = randn(2, 1900, seed=2)
    rows[0, 1800] = 9  # in the last of five parts
    rows[1, 40] = rows[1, 1800] = 9  # in the first and in the last
    out = torch.full((2, 2, 4), -77.0)
    simulated.probe("row_parts", rows, out)
    whole, merged, missing, reversed_ties = out.unbind(2)
    assert torch.equal(whole, merged)
    assert whole[:, 0].tolist() == [1800, 40]
    assert missing[0, 0] != 1800
    assert reversed_ties[1, 0] == 1800
    assert torch.equal(reversed_ties[:, 1], merged[:, 1])  # noise makes no ties
    rows[:, 1536:] = 30  # all likely tokens are in the last part
    simulated.probe("row_parts", rows, out)
    assert (out[:, :, 1] >= 1536).all() and (out[:, :, 2] < 1536).all()
