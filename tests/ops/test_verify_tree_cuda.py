"""verify_tree on CUDA, simulated or on a GPU: the path, the count and the bonus token are those of the CPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specengine import _C
from specengine.draft_trees.token_masks import pack_masks
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.ops import verify_tree as module
from specengine.ops.sampling_table import SamplingTable
from specengine.ops.verify_tree import Accepted, VerifyWorkspace, verify_tree, verify_tree_reference
from specengine.types import SamplingParams
from tests.backends import cpu_kernels
from tests.ops.cases import NODE_COUNTS, chain, comb, randn, random_tree, star
from tests.ops.verifying import (
    CPU,
    PARAMS,
    Batch,
    crowded,
    history_of,
    make_batch,
    random_masks,
    random_params,
    to_device,
)

SHAPES = (random_tree, chain, star, comb)


def on_cpu(batch: Batch) -> Accepted:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_C", _C)
        return verify_tree(*batch.arguments())


def workspace_for(backend, batch: Batch) -> VerifyWorkspace:
    rows, vocab = batch.logits.shape
    workspace = VerifyWorkspace.empty(len(batch.params.seed), vocab, device=backend.device, rows=rows)
    if workspace.row_states is not None:
        workspace.row_states.fill_(-77)
    return workspace


def run(backend, batch: Batch, workspace: VerifyWorkspace | None = None):
    """What the backend accepts."""
    workspace = workspace or workspace_for(backend, batch)
    accepted = verify_tree(*batch.to(backend.device).arguments(), workspace)
    assert not workspace.counts.any() and not workspace.scores.any(), "a workspace that must be zero again"
    return to_device(accepted, CPU)


def assert_equal(a: Accepted, b: Accepted) -> None:
    for name in ("path", "path_length", "bonus"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("vocab", [5, 70])
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_matches_the_reference(cuda_backend, name, vocab):
    trees = [random_tree(20, 1), comb(16), star(12), chain(6), [-1], star(16)]
    batch = make_batch(trees, [PARAMS[name]] * 6, vocab, seed=len(name))
    accepted = run(cuda_backend, batch)
    assert_equal(accepted, verify_tree_reference(*batch.arguments()))
    assert accepted.path_length.max() > 1, "the case is meant to accept something"


def random_batch(seed: int, cases: int, vocab: int) -> Batch:
    """Trees of 1 to 40 nodes, most of them small; scores of several scales, with ties and with tokens left out."""
    rng = random.Random(seed)
    likely = rng.sample(range(vocab), min(4, vocab))
    sizes = [rng.choices([1, rng.randint(2, 4), rng.randint(5, 40)], [80, 18, 2])[0] for _ in range(cases)]
    trees = [rng.choice(SHAPES)(size) for size in sizes]
    drafts = [DraftTree([rng.choice(likely) for _ in tree], tree) for tree in trees]
    tree = TreeBatch.of(drafts, CPU)
    rows = len(tree.tokens)
    logits = randn(rows, vocab, seed=seed) * torch.tensor(rng.choices([0.0, 0.5, 2.0, 8.0], k=rows))[:, None]
    logits[:, likely] += 3
    tied, masked = (torch.tensor(rng.choices([False, True], [3, 1], k=rows)) for _ in range(2))
    logits[tied] = logits[tied].round()
    left_out = randn(rows, vocab, seed=seed + 1) > 0
    left_out[:, likely[0]] = False
    logits[masked[:, None] & left_out] = -torch.inf
    words = likely + rng.sample(range(vocab), min(9, vocab))
    histories = [[*rng.choices(words, k=rng.randint(0, 30)), draft.tokens[0]] for draft in drafts]
    history = history_of(histories, [rng.randint(0, len(row)) for row in histories])
    params = SamplingTable.of(
        [random_params(rng, vocab, likely) for _ in trees], [rng.randrange(2**63) for _ in range(cases)]
    )
    return Batch(logits, tree, params, history)


VOCABULARIES = (1, 2, 3, 5, 8, 17, 40, 63, 64, 65, 100, 127, 128, 250, 517, 1000, 2047, 2048, 2049, 3004)


@pytest.mark.quick(4)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_ten_thousand_random_cases_match_the_cpu(cuda_backend, vocab):
    batch = random_batch(vocab, 10_000 // len(VOCABULARIES), vocab)
    accepted = run(cuda_backend, batch)
    assert_equal(accepted, on_cpu(batch))
    assert accepted.path_length.max() > 1 and (vocab < 5 or len(set(accepted.bonus.tolist())) > 4)


@pytest.mark.parametrize("vocab", [40, 307])
def test_filters_take_tokens_in_the_order_of_the_cpu_whatever_the_temperature_rounds(cuda_backend, vocab):
    batch, rng = random_batch(vocab, 100, vocab), random.Random(vocab)
    batch.logits.copy_(crowded(len(batch.logits), vocab, vocab))
    heats = torch.tensor([10 ** rng.uniform(-4, 6) for _ in range(100)])
    top_k = torch.tensor(rng.choices([0, 1, 2, 3], k=100), dtype=torch.int32)
    top_p = torch.tensor(rng.choices([1e-6, 0.5, 0.999999, 1.0], k=100))
    batch = replace(batch, params=replace(batch.params, temperature=heats, top_k=top_k, top_p=top_p))
    assert_equal(run(cuda_backend, batch), on_cpu(batch))


@pytest.mark.quick(2)
@pytest.mark.parametrize("vocab", [33, 2049, 5, 64, 1000, 3004])
def test_random_cases_with_masks_match_the_cpu(cuda_backend, vocab):
    batch = random_batch(vocab + 1, 150, vocab)
    masks = random_masks(batch.tree, vocab, vocab)
    masks[:, 0] = True
    batch.logits[:, 0] = batch.logits[:, 0].clamp(min=-30)  # not every row is left without a token
    with cpu_kernels():
        expected = verify_tree(*batch.arguments(), masks=pack_masks(masks))
    moved, workspace = batch.to(cuda_backend.device), workspace_for(cuda_backend, batch)
    accepted = verify_tree(*moved.arguments(), workspace, masks=cuda_backend.put(pack_masks(masks)))
    assert_equal(to_device(accepted, CPU), expected)
    assert expected.path_length.max() > 1


@pytest.mark.parametrize("vocab", [49152, 49155])
def test_a_vocabulary_of_real_size_matches_the_cpu_with_any_number_of_blocks_per_row(cuda_backend, request, vocab):
    names = ["greedy", "plain", "everything", "top_p", "greedy penalties", "cold"]
    batch = make_batch([comb(3), [-1], [-1], [-1], [-1], [-1]], [PARAMS[name] for name in names], vocab, seed=3)
    expected = on_cpu(batch)
    assert_equal(run(cuda_backend, batch), expected)
    if cuda_backend.name == "sim":
        simulated = request.getfixturevalue("simulated")
        request.addfinalizer(lambda: simulated.set_multiprocessors(4))
        for multiprocessors in (1, 1000):
            simulated.set_multiprocessors(multiprocessors)
            assert_equal(run(cuda_backend, batch), expected)


@pytest.mark.quick(2)
@pytest.mark.parametrize("nodes", NODE_COUNTS)
def test_every_node_count_matches_the_cpu(cuda_backend, nodes):
    shapes = SHAPES if nodes < 100 else (random_tree, chain)
    for params in (PARAMS["everything"], PARAMS["greedy penalties"])[: 2 if nodes < 100 else 1]:
        trees = [shape(nodes) for shape in (shapes if nodes < 40 else shapes[:2])]
        batch = make_batch(trees, [params] * len(trees), 9, seed=nodes)
        assert_equal(run(cuda_backend, batch), on_cpu(batch))


@pytest.mark.parametrize("vocab", [3, 64, 1000, 5001])
def test_ties_go_to_the_lower_token(cuda_backend, vocab):
    logits = randn(12, vocab).mul(2).round()
    logits[3:6] = 0
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    tree, history = TreeBatch.chains([[0]] * 12, CPU), history_of([[0]] * 12, [0] * 12)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=0.7, top_p=1e-6),
    ):
        batch = Batch(logits, tree, SamplingTable.of([params] * 12, range(12)), history)
        assert run(cuda_backend, batch).bonus.tolist() == expected


@pytest.mark.parametrize("top_k, top_p, kept", [(1500, 1.0, 1500), (0, 0.5, 1500), (2000, 0.5, 1000), (1, 1e-6, 1)])
def test_filters_that_end_among_equal_scores_keep_the_lower_tokens(cuda_backend, top_k, top_p, kept):
    tree, history = TreeBatch.chains([[0]] * 40, CPU), history_of([[0]] * 40, [0] * 40)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    batch = Batch(torch.zeros(40, 3000), tree, SamplingTable.of([params] * 40, range(40)), history)
    accepted = run(cuda_backend, batch)
    assert_equal(accepted, on_cpu(batch))
    assert 0.8 * (kept - 1) <= max(accepted.bonus.tolist()) < kept


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None], ids=str)
@pytest.mark.parametrize("name", ["greedy", "cold", "everything"])
def test_a_walk_that_meets_scores_without_a_distribution_ends_there_without_a_token(cuda_backend, bad, name):
    params = replace(PARAMS[name], top_k=min(PARAMS[name].top_k, 1), logit_bias=None)
    batch = make_batch([chain(4), comb(9)], [params] * 2, 20, seed=2)
    workspace = workspace_for(cuda_backend, batch)
    reached = run(cuda_backend, batch)
    assert_equal(reached, on_cpu(batch))
    path = reached.path[1, : int(reached.path_length[1])].tolist()
    assert 1 < len(path) < 9
    for node in range(9):
        poisoned = batch.logits.clone()
        poisoned[4 + node] = -torch.inf if bad is None else poisoned[4 + node]
        poisoned[4 + node, 17] = -torch.inf if bad is None else bad
        accepted = run(cuda_backend, replace(batch, logits=poisoned), workspace)
        if node in path:
            until = path[: path.index(node) + 1]
            assert accepted.path[1].tolist() == [*until, *[-1] * (9 - len(until))]
            assert accepted.path_length[1] == len(until) and accepted.bonus[1] == -1
            assert accepted.bonus[0] == reached.bonus[0] and torch.equal(accepted.path[0], reached.path[0])
        else:
            assert_equal(accepted, reached)


@pytest.mark.parametrize("place", [0, 20_000, 39_999])
@pytest.mark.parametrize("name", ["greedy", "plain", "top_p"])
def test_one_bad_score_anywhere_in_a_long_row_is_noticed(cuda_backend, name, place):
    batch = make_batch([[-1]] * 40, [PARAMS[name]] * 40, 40_000, seed=1)
    batch.logits[7, place], batch.logits[8, place] = torch.nan, torch.inf
    bonus = run(cuda_backend, batch).bonus
    assert (bonus == -1).nonzero().flatten().tolist() == [7, 8]


@pytest.mark.parametrize("params", [SamplingParams(repetition_penalty=1e-3), SamplingParams(temperature=1e-4)], ids=str)
def test_scores_driven_out_of_float32_by_a_parameter_give_no_token(cuda_backend, params):
    tree, history = TreeBatch.chains([[0]], CPU), history_of([[0]], [0])
    batch = Batch(torch.full((1, 8), 3e37), tree, SamplingTable.of([params], [0]), history)
    accepted = run(cuda_backend, batch)
    assert accepted.bonus.tolist() == [-1] and accepted.path_length.tolist() == [1] and accepted.path.tolist() == [[0]]


def test_padding_and_idle_requests_change_nothing_for_the_others(cuda_backend):
    """The rows of a graph: 7 per request, whatever the trees need; the second and the last request are idle."""
    width, names = 7, ["everything", "plain", "repetition", "greedy bias", "plain"]
    trees = [random_tree(5), [-1], comb(7), chain(3), [-1]]
    batch = make_batch(trees, [PARAMS[name] for name in names], 50, seed=9)
    expected = on_cpu(batch)
    starts = batch.tree.row_start.tolist()
    tokens, parents = (torch.full((5, width), -1, dtype=torch.int32) for _ in range(2))
    logits = torch.full((5, width, 50), torch.nan)
    for b in (0, 2, 3):
        rows, nodes = slice(starts[b], starts[b + 1]), len(trees[b])
        tokens[b, :nodes], parents[b, :nodes] = batch.tree.tokens[rows], batch.tree.parents[rows]
        logits[b, :nodes] = batch.logits[rows]
    row_start = torch.arange(0, 5 * width + 1, width, dtype=torch.int32)
    static = TreeBatch(tokens.flatten(), parents.flatten(), torch.empty(0), row_start, None, width)
    length = batch.history.length.clone()
    length[[1, 4]] = -7
    padded = Batch(logits.flatten(0, 1), static, batch.params, replace(batch.history, length=length))
    accepted = run(cuda_backend, padded)
    assert accepted.path_length[[1, 4]].tolist() == [0, 0] and accepted.bonus[[1, 4]].tolist() == [-1, -1]
    assert (accepted.path[[1, 4]] == -1).all()
    for b in (0, 2, 3):
        assert torch.equal(accepted.path[b], expected.path[b])
        assert accepted.path_length[b] == expected.path_length[b] and accepted.bonus[b] == expected.bonus[b]
    assert expected.path_length[[0, 2, 3]].max() > 1


@pytest.mark.parametrize("name", ["repetition", "frequency", "everything"])
def test_long_histories_count_every_token(cuda_backend, name):
    rng = random.Random(7)
    batch = make_batch([comb(5), chain(3)], [PARAMS[name]] * 2, 600, seed=5)
    histories = [[*rng.choices(range(600), k=length), int(batch.tree.tokens[0])] for length in (9000, 37)]
    for prompt in (0, 4321, 9001):
        batch.history = history_of(histories, [prompt, min(prompt, 38)])
        accepted = run(cuda_backend, batch)
        assert_equal(accepted, on_cpu(batch))
        assert_equal(accepted, verify_tree_reference(*batch.arguments()))


def test_a_workspace_serves_one_batch_after_the_other(cuda_backend):
    batches = [make_batch([comb(4), chain(3), [-1]], [PARAMS[name]] * 3, 70, seed=8) for name in PARAMS]
    workspace = workspace_for(cuda_backend, batches[0])
    for batch in batches:
        assert_equal(run(cuda_backend, batch, workspace), on_cpu(batch))


def test_an_empty_batch_is_accepted(cuda_backend):
    batch = Batch(torch.empty(0, 8), TreeBatch.of([], CPU), SamplingTable.of([], []), history_of([], []))
    accepted = run(cuda_backend, batch)
    assert accepted.path.shape == (0, 0) and accepted.path_length.shape == (0,) and accepted.bonus.shape == (0,)


def test_more_nodes_than_a_tree_may_have_and_a_missing_workspace_are_refused(cuda_backend):
    batch = make_batch([[-1]], [SamplingParams()], 8)
    wide = replace(batch.tree, nodes=257)
    with pytest.raises(ValueError, match=r"^path: expected at most 256 columns"):
        run(cuda_backend, Batch(batch.logits, wide, batch.params, batch.history))
    with pytest.raises(ValueError, match=r"^row_states: expected a tensor"):
        run(cuda_backend, batch, VerifyWorkspace.empty(1, 8, device=cuda_backend.device))


@pytest.mark.sim
def test_no_order_of_the_threads_shows_in_the_result(simulated, monkeypatch):
    from tests.ops.conftest import Backend

    batch = random_batch(11, 40, 300)
    expected = on_cpu(batch)
    monkeypatch.setattr(module, "_C", simulated)
    for seed in range(5):
        simulated.set_schedule(seed)
        assert_equal(run(Backend("sim", CPU), batch), expected)
