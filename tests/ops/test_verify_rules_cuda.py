"""Every rule on CUDA, simulated or on a GPU: paths, bonus tokens, relaxed counts and drawn siblings are the CPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine.draft_trees.token_masks import pack_masks
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.ops.draw_siblings import draw_siblings
from specengine.rules import parse_rule
from tests.backends import cpu_kernels
from tests.ops.cases import chain, comb, randn
from tests.ops.rule_cases import RULES, VOCABULARIES, Case, assert_equal, on_cpu, random_case, run
from tests.ops.verifying import PARAMS, Batch, make_batch, random_masks


@pytest.mark.quick(8)
@pytest.mark.parametrize("spec", RULES)
def test_random_cases_match_the_cpu(cuda_backend, spec):
    rule, accepted, relaxed = parse_rule(spec), 0, 0
    for seed, vocab in enumerate(VOCABULARIES):
        for variant in (0, 1):
            case = random_case(2 * seed + variant, 18 if vocab < 1000 else 4, vocab, spec == "block")
            expected = on_cpu(case, rule)
            found = run(cuda_backend, case, rule)
            assert_equal(found, expected)
            assert_equal(run(cuda_backend, case, rule, noted=False), expected)
            accepted, relaxed = accepted + int(found.path_length.sum()), relaxed + int(found.relaxed.sum())
    assert accepted > 300 and (rule.lossless or relaxed > 0)


@pytest.mark.quick(4)
@pytest.mark.parametrize("spec", RULES)
def test_random_cases_with_masks_match_the_cpu(cuda_backend, spec):
    rule, accepted = parse_rule(spec), 0
    for seed, vocab in enumerate((2, 17, 64, 130)):
        case = random_case(seed, 12, vocab, spec == "block")
        masks = random_masks(case.batch.tree, vocab, seed)
        case.masks = pack_masks(masks)
        case.batch.logits.clamp_(min=-50)  # an allowed token is a possible one
        found, expected = run(cuda_backend, case, rule), on_cpu(case, rule)
        assert_equal(found, expected)
        assert_equal(run(cuda_backend, case, rule, noted=False), expected)
        accepted += int((found.path_length - 1).sum())
    assert accepted > 10


@pytest.mark.parametrize("spec", RULES)
def test_padding_and_idle_requests_change_nothing_for_the_others(cuda_backend, spec):
    """The rows of a graph: as many per request, whatever the trees need; the second request is idle."""
    rule, vocab, width = parse_rule(spec), 30, 6
    batch = make_batch([chain(4), [-1], chain(6)], [PARAMS["everything"], PARAMS["plain"], PARAMS["cold"]], vocab)
    plain = Case(batch, DraftLogits(randn(11, vocab, seed=3), torch.arange(11, dtype=torch.int32)))
    expected = on_cpu(plain, rule)
    places = [*range(4), 6, *range(12, 18)]
    tokens, parents, rows = (torch.full((18,), -1, dtype=torch.int32) for _ in range(3))
    tokens[places], parents[places], rows[places] = batch.tree.tokens, batch.tree.parents, plain.draft.rows
    tokens[6], logits = -1, torch.full((18, vocab), torch.nan)
    logits[places] = batch.logits
    length = batch.history.length.clone()
    length[1] = -7
    starts = torch.arange(0, 19, width, dtype=torch.int32)
    static = TreeBatch(tokens, parents, torch.empty(0), starts, None, width)
    padded = Batch(logits, static, batch.params, replace(batch.history, length=length))
    found = run(cuda_backend, Case(padded, replace(plain.draft, rows=rows)), rule)
    assert (found.path[1] == -1).all()
    assert [int(part[1]) for part in (found.path_length, found.bonus, found.relaxed)] == [0, -1, 0]
    for name in ("path", "path_length", "bonus", "relaxed"):
        assert torch.equal(getattr(found, name)[[0, 2]], getattr(expected, name)[[0, 2]]), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("spec", RULES)
def test_a_root_without_a_distribution_gives_no_token(cuda_backend, spec, bad):
    batch = make_batch([chain(3), chain(3)], [PARAMS["top_p"], PARAMS["plain"]], 20)
    batch.logits[0, : 20 if bad < 0 else 1] = bad
    found = run(
        cuda_backend, Case(batch, DraftLogits(randn(1, 20), torch.zeros(6, dtype=torch.int32))), parse_rule(spec)
    )
    assert found.bonus[0] == -1 and found.path_length[0] == 1 and found.bonus[1] >= 0


@pytest.mark.parametrize("replacement, as_match", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("vocab", [5, 17, 64, 130, 1400])
def test_drawn_siblings_match_the_cpu(cuda_backend, vocab, replacement, as_match):
    names = list(PARAMS)
    batch = make_batch([comb(4) if i % 2 else chain(3) for i in range(len(names))], [PARAMS[n] for n in names], vocab)
    requests = torch.arange(len(names), dtype=torch.int32)
    nodes = (requests % 3).int()
    index = None if vocab % 2 else torch.arange(vocab, dtype=torch.int32).roll(1)
    if index is not None and vocab > 2:
        index[::3] = -1
    how = (4, replacement)
    logits = randn(len(names), vocab, seed=5)

    def draw(put, tree, params, history, *rest):
        where = (put(logits), put(nodes), tree, put(requests), params, history)
        return draw_siblings(*where, *rest, index=places, as_match=as_match).cpu()

    places = index if index is None else cuda_backend.put(index)
    found = draw(cuda_backend.put, *batch.to(cuda_backend.device).arguments()[1:], *how)
    places = index
    with cpu_kernels():
        expected = draw(lambda t: t, *batch.arguments()[1:], *how)
    assert torch.equal(found, expected)
    assert len(set(found.flatten().tolist())) > 2


def test_rows_of_siblings_that_are_padding_or_have_no_distribution_give_none(cuda_backend):
    batch = make_batch([chain(3)] * 4, [PARAMS["everything"]] * 4, 20).to(cuda_backend.device)
    logits = randn(4, 20)
    logits[2, 7] = torch.nan
    nodes, requests = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2, -1], [-1, 1, 2, 3]))
    put = cuda_backend.put
    found = draw_siblings(put(logits), put(nodes), batch.tree, put(requests), batch.params, batch.history, 2, False)
    assert (found[[0, 2, 3]] == -1).all() and (found[1] >= 0).all()


def test_rows_of_nodes_beyond_their_tree_or_the_largest_one_give_none(cuda_backend):
    batch, put = make_batch([chain(3)] * 2, [PARAMS["everything"]] * 2, 20).to(cuda_backend.device), cuda_backend.put
    parents, starts = (torch.tensor(x, dtype=torch.int32) for x in (chain(300), [0, 300, 300]))
    tree = TreeBatch(
        put(torch.full((300,), 7, dtype=torch.int32)), put(parents), torch.empty(0), put(starts), None, 300
    )
    nodes, requests = (put(torch.tensor(x, dtype=torch.int32)) for x in ([299, 255, 0], [0, 0, 1]))
    found = draw_siblings(put(randn(3, 20)), nodes, tree, requests, batch.params, batch.history, 2, False)
    assert (found[[0, 2]] == -1).all() and (found[1] >= 0).all()


@pytest.mark.sim
def test_no_order_of_the_threads_shows_in_the_result(simulated, cuda_backend):
    case, rule = random_case(3, 6, 70, False), parse_rule("traversal")
    expected = on_cpu(case, rule)
    for seed in range(4):
        if cuda_backend.name == "sim":
            simulated.set_schedule(seed)
        assert_equal(run(cuda_backend, case, rule), expected)


@pytest.mark.parametrize("spec", RULES)
def test_a_path_of_many_nodes_is_walked(cuda_backend, spec):
    batch = make_batch([chain(150)], [PARAMS["greedy"]], 3)
    batch.tree.tokens.fill_(2)
    batch.logits[:, 2] = 9
    case = Case(batch, DraftLogits(batch.logits.clone(), torch.arange(150, dtype=torch.int32)))
    found = run(cuda_backend, case, parse_rule(spec))
    assert found.path[0].tolist() == list(range(150)) and (found.path_length[0], found.bonus[0]) == (150, 2)
