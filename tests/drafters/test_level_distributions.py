"""Drawn trees of a drafter that has nothing but its logits: their law is the enumerated one."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from specengine import SamplingParams
from specengine.draft_trees.shapes import Beam
from tests.drafters.requests import with_logits
from tests.drafters.table_drafter import Table
from tests.rules.drafting import TREES, sampled

VOCAB, KNOWN, ROOT = 6, [4, 1, 3], 2  # the drafter's columns are these tokens of the target
LOGITS = torch.randn(VOCAB, len(KNOWN), generator=torch.Generator().manual_seed(2))
DRAWS, TEMPERATURE = 6000, 0.8


def table(replacement: bool = False) -> Table:
    return Table(LOGITS, Beam(2, 2), known=KNOWN, replacement=replacement)


def request_of(seed: int, limit: int = 2, **options):
    params = SamplingParams(temperature=TEMPERATURE, **options)
    own = {"params": params, "seed": seed, "draft_limit": limit, "drafter_reads": True}
    return SimpleNamespace(tokens=[ROOT], prompt_length=1, **own)


def draft_of(path) -> np.ndarray:
    """The distribution behind a path, over the target's tokens."""
    row = np.zeros(VOCAB)
    row[KNOWN] = (LOGITS[[ROOT, *path][-1]].double() / TEMPERATURE).softmax(-1).numpy()
    return row


def p_value(replacement: bool, told: bool, draws: int = DRAWS) -> float:
    """Compares drawn trees with those that are enumerated with or without replacement."""
    law = {tuple(tree.tokens[1:]): tree.probability for tree in sampled(draft_of, told, TREES["backbone"])}
    assert sum(law.values()) == pytest.approx(1)
    trees, _ = with_logits(table(replacement), [request_of(seed) for seed in range(draws)], sampled=True)
    found = Counter((first, left, right, second) for _, first, second, left, right in (tree.tokens for tree in trees))
    assert set(found) <= set(law) and trees[0].parents == [-1, 0, 0, 1, 1]
    wanted, seen = np.array([draws * law[tree] for tree in law]), np.array([found[tree] for tree in law])
    rare = wanted < 5
    wanted, seen = (np.append(each[~rare], each[rare].sum()) for each in (wanted, seen))
    return float(stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)


@pytest.mark.statistics
@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_trees_have_the_enumerated_law(replacement):
    assert p_value(replacement, told=replacement) > 1e-3


@pytest.mark.statistics
@pytest.mark.parametrize("replacement", [False, True])
def test_so_have_trees_that_the_device_draws(cuda_backend, replacement):
    assert p_value(replacement, told=replacement, draws=500) > 1e-3


@pytest.mark.statistics
def test_a_law_with_replacement_is_not_mistaken_for_one_without():
    assert p_value(replacement=False, told=True) < 1e-9


def test_the_rule_gets_the_logits_that_the_children_were_drawn_from():
    (tree,), found = with_logits(table(), [request_of(7)], sampled=True)
    expanded = [0, 1]
    assert [row >= 0 for row in found.rows.tolist()] == [node in expanded for node in range(5)]
    assert found.logits[found.rows[expanded].long()].equal(LOGITS[[tree.tokens[node] for node in expanded]])
    assert found.index.tolist() == [-1, 1, -1, 2, 0, -1] and not found.replacement


def test_at_temperature_0_and_beside_probabilities_children_are_the_likeliest():
    first, second = [KNOWN[column] for column in LOGITS[ROOT].topk(2).indices]
    greedy = request_of(3)
    greedy.params = SamplingParams()
    (tree,), _ = with_logits(table(), [greedy], sampled=True)
    assert tree.tokens[1] == first and tree.parents == [-1, 0, 1]  # no other token has any probability
    for request in (greedy, request_of(3)):
        (tree,), _ = with_logits(table(), [request], sampled=False)
        assert list(tree.tokens[1:3]) == [first, second] and tree.parents == [-1, 0, 0, 1, 1]


def test_a_request_drafts_no_deeper_than_it_goes():
    trees, found = with_logits(table(), [request_of(1, limit) for limit in (0, 1, 2)], sampled=True)
    assert [len(tree.tokens) for tree in trees] == [1, 3, 5]
    assert [row >= 0 for row in found.rows.tolist()] == [False, True, False, False, True, True, False, False, False]


def test_a_request_that_is_not_read_is_drafted_for_by_what_keeps_nothing_of_it():
    unread = request_of(1)
    unread.drafter_reads = False
    assert table().ready([unread]) == 1 and len(with_logits(table(), [unread], sampled=True)[0][0].tokens) > 1
