"""verify_tree against its reference: paths, bonus tokens, parameters, ties; its law is in test_verify_law.py."""

import random

import pytest
import torch

from specengine import _C
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.ops.sampling_table import SamplingTable
from specengine.ops.target_distribution import draw_reference
from specengine.ops.verify_tree import (
    Accepted,
    VerifyWorkspace,
    verify_tree,
    verify_tree_on_host,
    verify_tree_reference,
)
from specengine.rules import parse_rule
from specengine.types import SamplingParams
from tests.ops.cases import NODE_COUNTS, chain, comb, randn, random_tree, star
from tests.ops.verifying import CPU, PARAMS, Batch, crowded, history_of, make_batch

pytestmark = pytest.mark.usefixtures("instruction_set")


def equal(a: Accepted, b: Accepted) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("path", "path_length", "bonus"))


def check(batch: Batch) -> Accepted:
    workspace = VerifyWorkspace.empty(len(batch.params.seed), batch.logits.shape[1])
    accepted = verify_tree(*batch.arguments(), workspace)
    assert equal(accepted, verify_tree_reference(*batch.arguments()))
    assert not workspace.counts.any()
    return accepted


def roots(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int] | None = None) -> list[int]:
    """What root-only trees draw, one request per row of logits."""
    count = len(logits)
    table = SamplingTable.of(params, seeds or [0] * count)
    tree = TreeBatch.chains([[0]] * count, CPU)
    return verify_tree(logits, tree, table, history_of([[0]] * count, [0] * count)).bonus.tolist()


@pytest.mark.parametrize("vocab", [5, 40, 64, 130])
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_matches_the_reference(name, vocab):
    trees = [random_tree(40, 1), comb(31), star(12), chain(9), [-1], random_tree(64, 2)] * 2
    accepted = check(make_batch(trees, [PARAMS[name]] * 12, vocab, seed=len(name)))
    assert accepted.path_length.max() > 1, "the case is meant to accept something"


def test_a_batch_may_mix_all_parameters_and_shapes():
    names = list(PARAMS) * 3
    trees = [shape(nodes) for shape in (random_tree, comb, star) for nodes in range(1, len(PARAMS) + 1)]
    batch = make_batch(trees, [PARAMS[name] for name in names], 77, seed=5)
    together = check(batch)
    starts = batch.tree.row_start.tolist()
    for b in range(0, len(names), 5):  # and no request depends on the others
        rows = slice(starts[b], starts[b + 1])
        tree = TreeBatch.of([DraftTree(batch.tree.tokens[rows].tolist(), batch.tree.parents[rows].tolist())], CPU)
        table = SamplingTable.of([PARAMS[names[b]]], [int(batch.params.seed[b])])
        own = batch.history.tokens[b, : int(batch.history.length[b])].tolist()
        history = history_of([own], [int(batch.history.prompt_length[b])])
        alone = verify_tree(batch.logits[rows], tree, table, history)
        count = int(alone.path_length)
        assert count == together.path_length[b] and alone.bonus[0] == together.bonus[b]
        assert torch.equal(alone.path[0, :count], together.path[b, :count])


@pytest.mark.parametrize("nodes", NODE_COUNTS)
def test_every_node_count_matches_the_reference(nodes):
    for shape in (random_tree, chain, star, comb):
        for params in (PARAMS["plain"], PARAMS["greedy"]):
            check(make_batch([shape(nodes)] * 3, [params] * 3, 9, seed=nodes))


def test_more_than_256_nodes_are_refused():
    tree = TreeBatch.chains([[0] * 257], CPU)
    with pytest.raises(ValueError, match=r"^row_start: request 0 has 257 nodes"):
        verify_tree(randn(257, 8), tree, SamplingTable.of([SamplingParams()], [0]), history_of([[0]], [0]))


@pytest.mark.parametrize("name", ["greedy", "plain", "everything"])
def test_a_vocabulary_of_real_size_matches_the_reference(name):
    check(make_batch([random_tree(8), chain(5)], [PARAMS[name]] * 2, 49152, seed=3))


def test_a_draft_that_is_all_right_is_accepted_whole_and_one_that_is_all_wrong_not_at_all():
    logits = torch.zeros(6, 10)
    logits[range(6), [1, 2, 3, 4, 5, 6]] = 9.0
    for tokens, path, bonus in (([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], 6), ([0, 9, 9, 9, 9, 9], [0], 1)):
        tree = TreeBatch.of([DraftTree(tokens, chain(6))], CPU)
        batch = Batch(logits, tree, SamplingTable.of([SamplingParams()], [0]), history_of([[0]], [1]))
        accepted = check(batch)
        assert accepted.path.tolist() == [[*path, *[-1] * (6 - len(path))]]
        assert accepted.path_length.tolist() == [len(path)] and accepted.bonus.tolist() == [bonus]


def test_the_first_of_duplicate_siblings_is_followed():
    logits = torch.zeros(5, 10)
    logits[0, 4], logits[2, 7], logits[3, 8] = 9, 9, 9
    tree = TreeBatch.of([DraftTree([0, 5, 4, 4, 7], [-1, 0, 0, 0, 3])], CPU)
    accepted = check(Batch(logits, tree, SamplingTable.of([SamplingParams()], [0]), history_of([[0]], [1])))
    assert accepted.path.tolist() == [[0, 2, -1, -1, -1]] and accepted.bonus.tolist() == [7]


@pytest.mark.parametrize("theta, alone", [(0.5, 1), (0.999, -1)])
@pytest.mark.parametrize("mode", ["strict", "lossless-base"])
def test_of_two_close_tokens_the_better_one_is_followed_and_a_distant_one_is_not(theta, alone, mode):
    rule, batch = parse_rule(f"margin:theta={theta},mode={mode}"), make_batch([star(3)], [PARAMS["greedy"]], 9)
    batch.tree.tokens.copy_(torch.tensor([0, 5, 7]))
    batch.logits.fill_(-1)
    batch.logits[0, 7], batch.logits[0, 5] = 2.0, 1.9
    assert verify_tree(*batch.arguments(), rule=rule).path[0, 1] == 2
    batch.tree.tokens[2] = 8
    assert verify_tree(*batch.arguments(), rule=rule).path[0, 1] == alone


@pytest.mark.parametrize("vocab", [3, 8, 9, 64, 100, 1000])
def test_ties_go_to_the_lower_token(vocab):
    logits = randn(20, vocab).mul(2).round()
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    for params in (
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-6),
    ):
        assert roots(logits, [params] * 20) == expected
    flat = torch.zeros(200, vocab)
    drawn = roots(flat, [SamplingParams(temperature=1.0, top_k=3)] * 200, list(range(200)))
    assert set(drawn) == set(range(min(3, vocab)))


@pytest.mark.parametrize("temperature", [1e-4, 0.7, 5.0])
def test_top_k_1_is_greedy(temperature):
    logits = randn(50, 200)
    expected = roots(logits, [SamplingParams()] * 50)
    assert roots(logits, [SamplingParams(temperature=temperature, top_k=1)] * 50, list(range(50))) == expected


@pytest.mark.parametrize("vocab", [3, 40, 307, 1000])
def test_filters_keep_the_likeliest_token_whatever_the_temperature_rounds(vocab):
    cases, rng = 400, random.Random(vocab)
    logits = crowded(cases, vocab, vocab)
    seeds = [rng.randrange(2**62) for _ in range(cases)]
    biases = [{rng.randrange(vocab): rng.choice([-100.0, 100.0, rng.uniform(-100, 100)])} for _ in range(cases)]
    heats = [10 ** rng.uniform(-4, 6) for _ in range(cases)]
    narrow = [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.999999, "min_p": 1.0}]
    greedy = roots(logits, [SamplingParams(logit_bias=bias) for bias in biases])
    for filters in narrow:
        params = [SamplingParams(temperature=t, logit_bias=b, **filters) for t, b in zip(heats, biases, strict=True)]
        assert roots(logits, params, seeds) == greedy, filters
    wide = [
        SamplingParams(temperature=t, top_k=rng.choice([0, 2, 3]), top_p=rng.choice([1e-6, 0.5, 0.999999, 1.0]))
        for t in heats
    ]
    table, drawn = SamplingTable.of(wide, seeds), roots(logits, wide, seeds)
    assert drawn == [draw_reference(row.double(), table, b, [0], 0) for b, row in enumerate(logits)]


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("top_k", [0, 4])
def test_ties_at_the_edge_of_top_k_and_top_p_match_the_reference(top_p, top_k):
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    batch = make_batch([[-1]] * 300, [params] * 300, 90, seed=7)
    batch.logits.mul_(1.5).round_()
    check(batch)


def test_masked_scores_are_never_drawn():
    logits = torch.full((100, 70), -torch.inf)
    logits[:, [3, 65]] = 0.0
    params = [SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.1)] * 100
    assert set(roots(logits, params, list(range(100)))) == {3, 65}
    assert set(roots(logits, [SamplingParams()] * 100)) == {3}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_without_a_distribution_are_refused_where_the_walk_meets_them(bad, temperature):
    batch = make_batch([chain(4), comb(9)], [SamplingParams(temperature=temperature, top_k=1)] * 2, 20, seed=2)
    workspace = VerifyWorkspace.empty(2, 20)
    reached = verify_tree(*batch.arguments())
    visited = set(reached.path[1, : int(reached.path_length[1])].tolist())
    for node in range(9):
        poisoned = batch.logits.clone()
        poisoned[4 + node] = -torch.inf if bad is None else poisoned[4 + node]
        poisoned[4 + node, 17] = -torch.inf if bad is None else bad
        arguments = (poisoned, batch.tree, batch.params, batch.history, workspace)
        if node in visited:
            with pytest.raises(ValueError, match=rf"^logits: row {4 + node} \(request 1"):
                verify_tree(*arguments)
            assert not workspace.counts.any()
        else:
            assert equal(verify_tree(*arguments), reached)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(repetition_penalty=1e-3), SamplingParams(temperature=1e-4)],
    ids=["penalty", "temperature"],
)
def test_scores_driven_out_of_float32_by_a_parameter_are_refused(params):
    with pytest.raises(ValueError, match=r"^logits: row 0"):
        roots(torch.full((1, 8), 3e37), [params])


def test_an_empty_batch_is_accepted():
    accepted = verify_tree(torch.empty(0, 8), TreeBatch.of([], CPU), SamplingTable.of([], []), history_of([], []))
    assert accepted.path.shape == (0, 0) and accepted.path_length.shape == (0,) and accepted.bonus.shape == (0,)


def test_a_reused_workspace_and_any_number_of_threads_give_the_same():
    batch = make_batch([random_tree(30, b) for b in range(17)], list(PARAMS.values()), 130, seed=4)
    workspace = VerifyWorkspace.empty(17, 130)
    expected = verify_tree(*batch.arguments())
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        assert equal(verify_tree(*batch.arguments(), workspace), expected)
    assert equal(verify_tree_on_host(*batch.arguments()), expected)


@pytest.mark.parametrize("shape", [random_tree, chain, star, comb])
def test_tokens_that_are_known_give_the_walk_of_their_logits(shape):
    batch = make_batch([shape(n) for n in (1, 2, 33, 70)], [SamplingParams()] * 4, 40, seed=6)
    expected = verify_tree(*batch.arguments())
    drawn = batch.logits.argmax(dim=1).int()
    for verify in (verify_tree, verify_tree_on_host):
        assert equal(verify(drawn, *batch.arguments()[1:]), expected)
    assert expected.path_length.max() > 1


def test_a_row_without_a_token_is_refused_where_the_walk_meets_it():
    batch = make_batch([chain(4), comb(9)], [SamplingParams()] * 2, 20, seed=2)
    drawn = batch.logits.argmax(dim=1).int()
    reached = verify_tree(drawn, *batch.arguments()[1:])
    visited = reached.path[1, : int(reached.path_length[1])].tolist()
    assert 1 < len(visited) < 9
    for node in range(9):
        unknown = drawn.clone()
        unknown[4 + node] = -1
        if node in visited:
            position = int(batch.history.length[1]) + visited.index(node)
            with pytest.raises(ValueError, match=rf"^logits: row {4 + node} \(request 1, position {position}\)"):
                verify_tree(unknown, *batch.arguments()[1:])
        else:
            assert equal(verify_tree(unknown, *batch.arguments()[1:]), reached)


def test_a_call_reuses_what_an_earlier_one_with_its_workspace_has_returned():
    long, short = (make_batch([chain(9)], [SamplingParams()], 20, seed=seed) for seed in (1, 2))
    workspace = VerifyWorkspace.empty(1, 20)
    for scores in (lambda batch: batch.logits, lambda batch: batch.logits.argmax(dim=1).int()):
        outcomes = [verify_tree(scores(batch), *batch.arguments()[1:], workspace) for batch in (long, short)]
        assert outcomes[0] is outcomes[1] and equal(outcomes[1], verify_tree(*short.arguments()))
    assert not equal(verify_tree(*long.arguments()), verify_tree(*short.arguments()))
