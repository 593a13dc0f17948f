"""The law of draw_siblings and verify_tree together: the first three tokens of many cycles against the exact law.

Every trial drafts siblings and a child of each from distributions that depend on the path, and verifies the tree. Where
a cycle ends before three tokens the exact conditional law completes them, which leaves a right law right.
"""

from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from specengine.draft_trees.token_masks import pack_masks
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.ops.draw_siblings import draw_siblings
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.verify_tree import verify_tree
from specengine.rules import parse_rule
from specengine.types import SamplingParams
from tests.ops.cases import randn
from tests.ops.verifying import table_for
from tests.selection import wide

VOCAB = 5
TRIALS, CALL = 1_000_000, 250_000
SIMULATED_TRIALS = 100_000  # at about a millisecond each
TARGET = [1.2 * randn(1, VOCAB, seed=31), 1.2 * randn(VOCAB, VOCAB, seed=32), randn(VOCAB**2, VOCAB, seed=33)]
DRAFT = [1.2 * randn(1, VOCAB, seed=34), 1.2 * randn(VOCAB, VOCAB, seed=35)]
CASCADE = "cascade:token-v3,alpha=0.5"
FAMILIES = {  # rule, siblings of the root, with replacement
    "chain": ("rejection", 1, False),
    "distinct siblings": ("rejection", 3, False),
    "repeated siblings": ("rejection", 3, True),
    "block": ("block", 1, False),
    "traversal": ("traversal", 3, False),
    "cascade": (CASCADE, 2, False),
}
MASKS = [randn(1, VOCAB, seed=41) > -1, randn(VOCAB, VOCAB, seed=42) > -0.5, randn(VOCAB**2, VOCAB, seed=43) > -0.5]
for allowed, rows in zip(MASKS, TARGET, strict=True):
    allowed[range(len(rows)), rows.argmin(1)] = True  # each leaves a token, and not the likeliest one alone
PLAIN = SamplingParams(temperature=1.0)
SHAPED = SamplingParams(temperature=0.8, top_k=4, top_p=0.95, min_p=0.08)  # each changes some of the rows above


def batch_of(tokens: torch.Tensor, parents: list[int]) -> TreeBatch:
    """Makes trees of one shape. tokens: [trials, N]."""
    trials, nodes = tokens.shape
    start = torch.arange(0, trials * nodes + 1, nodes, dtype=torch.int32)
    all_parents = torch.tensor(parents, dtype=torch.int32).repeat(trials)
    return TreeBatch(tokens.int().flatten(), all_parents, torch.empty(0), start, None, nodes)


def one_cycle(
    spec, siblings, replacement, first_seed, trials, *, told=None, draft_scale=1.0, params=PLAIN, masked=False
):
    """(path, path_length, bonus, tokens [trials, N]) of trees with `siblings` children of the root and a child of each.

    told: what the rule hears of replacement instead.  draft_scale: of the logits it hears of, which should be 1.
    masked: whether the rule gets MASKS, which the drafter does not know.
    """
    table = table_for(params, trials)
    table.seed.add_(first_seed)
    history = TokenHistory(
        torch.zeros(trials, 1, dtype=torch.int32), *(torch.ones(trials, dtype=torch.int32) for _ in range(2))
    )
    root = torch.zeros(trials, 1, dtype=torch.long)
    everyone = torch.arange(trials, dtype=torch.int32)
    draw = partial(draw_siblings, params=table, history=history, replacement=replacement)
    root_rows = DRAFT[0].expand(trials, -1).contiguous()
    children = draw(root_rows, everyone * 0, batch_of(root, [-1]), everyone, count=siblings).long()
    parents = [-1, *[0] * siblings]
    nodes = torch.arange(1, siblings + 1, dtype=torch.int32).repeat(trials)
    tree = batch_of(torch.cat([root, children], dim=1), parents)
    rows = DRAFT[1][children.flatten()].contiguous()
    below = draw(rows, nodes, tree, everyone.repeat_interleave(siblings), count=1).long().reshape(trials, siblings)
    tokens = torch.cat([root, children, below], dim=1)
    logits = torch.cat(
        [TARGET[0].expand(trials, 1, -1), TARGET[1][children], TARGET[2][children * VOCAB + below]], dim=1
    )
    masks = [MASKS[0].expand(trials, 1, -1), MASKS[1][children], MASKS[2][children * VOCAB + below]]
    draft_logits = draft_scale * torch.cat([root_rows[:, None], DRAFT[1][children]], dim=1).flatten(0, 1).contiguous()
    inner = torch.arange(trials * (siblings + 1)).reshape(trials, siblings + 1)
    draft_rows = torch.cat([inner, torch.full((trials, siblings), -1)], dim=1).flatten().int()
    out = verify_tree(
        logits.flatten(0, 1).contiguous(),
        batch_of(tokens, [*parents, *range(1, siblings + 1)]),
        *(table, history),
        rule=parse_rule(spec),
        draft=DraftLogits(draft_logits, draft_rows, None, replacement if told is None else told),
        masks=pack_masks(torch.cat(masks, dim=1).flatten(0, 1)) if masked else None,
    )
    return out.path.long(), out.path_length, out.bonus.long(), tokens


def counted(spec, siblings, replacement, trials, **wrong) -> np.ndarray:
    """Counts each first, second and third token, int64 [V + 1, V + 1, V + 1]; the last index counts none."""
    counts = np.zeros((VOCAB + 1) ** 3, dtype=np.int64)
    for first in range(0, trials, CALL):
        size = min(CALL, trials - first)
        path, length, bonus, tokens = one_cycle(spec, siblings, replacement, first, size, **wrong)
        emitted = torch.full((size, 3), VOCAB)
        for i in range(3):
            on_path = tokens.gather(1, path[:, i + 1 : i + 2].clamp(min=0))[:, 0] if i + 1 < path.shape[1] else bonus
            emitted[:, i] = torch.where(length > i + 1, on_path, torch.where(length == i + 1, bonus, VOCAB))
        index = (emitted[:, 0] * (VOCAB + 1) + emitted[:, 1]) * (VOCAB + 1) + emitted[:, 2]
        counts += np.bincount(index.numpy(), minlength=len(counts))
    return counts.reshape((VOCAB + 1,) * 3)


def probs(logits: torch.Tensor, params: SamplingParams = PLAIN) -> np.ndarray:
    """Computes softmax after temperature, top-k, top-p and min-p, in this order."""
    found = (logits.double() / params.temperature).softmax(-1).numpy()
    ranks = (-found).argsort(-1).argsort(-1)
    if params.top_k:
        found = np.where(ranks < params.top_k, found, 0)
        found = found / found.sum(-1, keepdims=True)
    in_order = -np.sort(-found, axis=-1)
    before = np.take_along_axis(in_order.cumsum(-1) - in_order, ranks, -1)  # the mass of more likely tokens
    found = np.where(before < params.top_p, found, 0)
    found = np.where(found >= params.min_p * found.max(-1, keepdims=True), found, 0)
    return found / found.sum(-1, keepdims=True)


def left(probabilities: np.ndarray, allowed: torch.Tensor) -> np.ndarray:
    kept = probabilities * allowed.numpy()
    return kept / kept.sum(-1, keepdims=True)


def wanted(spec: str, level: int, params: SamplingParams = PLAIN, masked: bool = False) -> np.ndarray:
    """Returns the law [rows, V] of a token behind `level` others: the target's, or the mixture of the cascade.

    The cascade decides by the target's own probabilities. A mask comes before the target's filters and after the
    drafter's.
    """
    logits = TARGET[level].masked_fill(~MASKS[level], -torch.inf) if masked else TARGET[level]
    target = probs(logits, params)
    if spec != CASCADE or level == 2:
        return target
    draft, unshaped = probs(DRAFT[level], params), probs(logits)
    draft = left(draft, MASKS[level]) if masked else draft
    kept = draft * (unshaped >= (1 - parse_rule(spec).alpha) * unshaped.max(-1, keepdims=True))
    return kept + (1 - kept.sum(-1, keepdims=True)) * target


def p_value(spec: str, counts: np.ndarray, params: SamplingParams = PLAIN, masked: bool = False) -> float:
    """Computes chi-square of all triples of tokens; tokens that a cycle did not emit are drawn from the law itself."""
    rng, trials = np.random.default_rng(5), counts.sum()
    first, second, third = (wanted(spec, level, params, masked) for level in range(3))
    pairs = counts[:VOCAB, :VOCAB].copy()  # [first, second, third or none]
    for a in range(VOCAB):
        open_trials = counts[a, VOCAB].sum()
        pairs[a, :, VOCAB] += rng.multinomial(open_trials, second[a])
        for b in range(VOCAB):
            pairs[a, b, :VOCAB] += rng.multinomial(pairs[a, b, VOCAB], third[a * VOCAB + b])
    law = first[0][:, None, None] * second[:, :, None] * third.reshape(VOCAB, VOCAB, VOCAB)
    assert pairs[..., :VOCAB].sum() == trials
    if pairs[..., :VOCAB][law == 0].any():
        return 0.0
    return float(stats.chisquare(pairs[..., :VOCAB][law > 0], (law * trials)[law > 0]).pvalue)


@pytest.mark.quick(1)
@pytest.mark.statistics
@pytest.mark.parametrize("family", wide(FAMILIES, 3))
def test_the_first_three_tokens_follow_the_exact_law(family):
    counts = counted(*FAMILIES[family], TRIALS)
    assert (counts[:, VOCAB].sum() > 0) and (counts[:, :, :VOCAB].sum() > 0), "refusals and bonus tokens must occur"
    assert p_value(FAMILIES[family][0], counts) > 1e-4


@pytest.mark.full
@pytest.mark.statistics
@pytest.mark.parametrize("family", wide(FAMILIES))
def test_temperature_and_filters_shape_target_and_draft_alike(family):
    for rows in (*TARGET, *DRAFT):
        assert (probs(rows, SHAPED) == 0).any()
    counts = counted(*FAMILIES[family], 250_000, params=SHAPED)
    assert p_value(FAMILIES[family][0], counts, SHAPED) > 1e-4


@pytest.mark.quick(1)
@pytest.mark.statistics
@pytest.mark.parametrize("params", [PLAIN, SHAPED])
@pytest.mark.parametrize("family", wide(FAMILIES, 3))
def test_masks_that_the_drafter_does_not_know_keep_the_law(family, params):
    spec = FAMILIES[family][0]
    counts = counted(*FAMILIES[family], 250_000, params=params, masked=True)
    assert p_value(spec, counts, params, masked=True) > 1e-4
    assert p_value(spec, counts, params, masked=False) < 1e-9, "masks that take little show nothing"


@pytest.mark.full
@pytest.mark.statistics
def test_the_test_rejects_a_law_without_its_temperature():
    warmer = SamplingParams(temperature=0.85, top_k=4, top_p=0.95, min_p=0.08)
    assert p_value("rejection", counted("rejection", 3, False, 250_000, params=SHAPED), warmer) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cuda_ops_follow_the_exact_law(cuda_backend, family):
    if cuda_backend.name != "sim":
        pytest.skip("tensors of this test are the host's")
    assert p_value(FAMILIES[family][0], counted(*FAMILIES[family], SIMULATED_TRIALS)) > 1e-4


@pytest.mark.statistics
@pytest.mark.parametrize("family", wide(["chain", "distinct siblings", "block", "traversal", "cascade"], 2))
def test_the_test_rejects_draft_logits_that_are_off_by_a_temperature(family):
    assert p_value(FAMILIES[family][0], counted(*FAMILIES[family], 250_000, draft_scale=0.7)) < 1e-9


@pytest.mark.quick(1)
@pytest.mark.statistics
@pytest.mark.parametrize("spec", ["rejection", "traversal"])
def test_the_test_rejects_siblings_that_were_drawn_with_replacement_unbeknown_to_the_rule(spec):
    assert p_value(spec, counted(spec, 3, True, 250_000, told=False)) < 1e-9
