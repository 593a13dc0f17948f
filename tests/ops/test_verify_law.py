"""The law of verify_tree: frequencies of the first two tokens, through a tree, against the exact distribution.

The first token is the bonus of the first cycle or an accepted child; the second is then what follows the child in the
same cycle, or the first token of the next cycle. Both routes must together give the target's law, for every parameter.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from specengine.draft_trees.tree import TreeBatch
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.target_distribution import target_probs_reference
from specengine.ops.verify_tree import verify_tree
from specengine.types import SamplingParams
from tests.ops.cases import randn
from tests.ops.verifying import CPU, table_for

pytestmark = pytest.mark.statistics

TRIALS = 200_000
VOCAB = 6
PROMPT = [2, 5, 2]  # the root is its last token
FIRST = 1.5 * randn(VOCAB, seed=21)  # scores after the prompt
SECOND = 1.5 * randn(VOCAB, VOCAB, seed=22)  # row a: scores after prompt and token a
DRAFTED = [1, 4, 4, 0, 3]  # tokens of the drafted nodes
PARENTS = [-1, 0, 0, 0, 1, 2]  # children 1 and 4 (twice) of the root, then one child each of the first two

SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=1.6),
    "top_k": SamplingParams(temperature=1.0, top_k=4),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.15),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4),
}


def entries(table: SamplingTable, keep: torch.Tensor) -> SamplingTable:
    per_request = {n: v[keep].contiguous() for n, v in table.native._asdict().items() if not n.startswith("bias")}
    return replace(table, bias_start=table.bias_start[: int(keep.sum()) + 1].clone(), **per_request)


def verify_all(logits, parents: list[int], tokens, table: SamplingTable, history):
    """(path, path_length, bonus) of one tree shape for every trial.

    logits: [trials, N, V].  tokens: [trials, N].  history: [trials, T].
    """
    trials, nodes = tokens.shape
    tree = TreeBatch(
        tokens.int().flatten(),
        torch.tensor(parents, dtype=torch.int32).repeat(trials),
        torch.empty(0),
        torch.arange(0, trials * nodes + 1, nodes, dtype=torch.int32),
        None,
        nodes,
    )
    length = torch.full((trials,), history.shape[1], dtype=torch.int32)
    prompt = torch.full((trials,), len(PROMPT), dtype=torch.int32)
    out = verify_tree(logits.reshape(-1, VOCAB).contiguous(), tree, table, TokenHistory(history.int(), length, prompt))
    return out.path.long(), out.path_length, out.bonus.long()


def two_tokens(params: SamplingParams, trials: int = TRIALS) -> torch.Tensor:
    """The first two tokens of every trial, int64 [trials, 2], over one or two cycles."""
    table, prompt = table_for(params, trials), torch.tensor(PROMPT)
    tokens = torch.tensor([PROMPT[-1], *DRAFTED])
    rows = torch.stack([FIRST, *SECOND[tokens[1:4]], *SECOND[:2]])  # the last two are past the second token
    path, length, bonus = verify_all(
        rows.expand(trials, -1, -1), PARENTS, tokens.expand(trials, -1), table, prompt.expand(trials, -1).contiguous()
    )
    accepted = length > 1
    first = torch.where(accepted, tokens[path[:, 1].clamp(min=0)], bonus)
    second = torch.where(length > 2, tokens[path[:, 2].clamp(min=0)], bonus)
    rest = ~accepted  # nothing accepted: the second token is drawn by the next cycle
    history = torch.cat([prompt.expand(int(rest.sum()), -1), first[rest, None]], dim=1)
    _, _, second[rest] = verify_all(SECOND[first[rest], None], [-1], first[rest, None], entries(table, rest), history)
    assert accepted.any() and rest.any() and (length > 2).any(), "all routes to a second token must be taken"
    return torch.stack([first, second], dim=1)


def exact_law(params: SamplingParams) -> np.ndarray:
    """Probabilities [V, V] of the first two tokens."""
    table = SamplingTable.of([params], [0])
    first = target_probs_reference(FIRST.double(), table, 0, PROMPT, len(PROMPT))
    second = [target_probs_reference(SECOND[a].double(), table, 0, [*PROMPT, a], len(PROMPT)) for a in range(VOCAB)]
    return (first[:, None] * torch.stack(second)).numpy()


def p_value(tokens: torch.Tensor, law: np.ndarray) -> float:
    """Chi-square of the pairs against the law; 0 where an impossible pair occurred."""
    counts = np.bincount((tokens[:, 0] * VOCAB + tokens[:, 1]).numpy(), minlength=VOCAB * VOCAB)
    expected = law.flatten() * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    if expected[-1] < 5:  # too rare together to tell from nothing: joined to the rarest cell
        order = np.argsort(expected[:-1])
        observed[order[0]] += observed[-1]
        expected[order[0]] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_first_two_tokens_follow_the_exact_law(name):
    assert p_value(two_tokens(SETTINGS[name]), exact_law(SETTINGS[name])) > 1e-3


def test_the_law_of_blocks_of_tokens_is_exact():
    vocab = 150  # three blocks of noise, the last one short
    logits = randn(vocab, seed=23)
    tree = TreeBatch.chains([[0]] * TRIALS, CPU)
    ones = torch.ones(TRIALS, dtype=torch.int32)
    table = table_for(SamplingParams(temperature=1.0), TRIALS)
    scores = logits.expand(TRIALS, -1).contiguous()
    history = TokenHistory(torch.zeros(TRIALS, 1, dtype=torch.int32), ones, ones)
    counts = torch.bincount(verify_tree(scores, tree, table, history).bonus, minlength=vocab).numpy()
    expected = logits.double().softmax(0).numpy() * TRIALS
    assert expected.min() > 5
    assert stats.chisquare(counts, expected).pvalue > 1e-3
    assert stats.chisquare(np.roll(counts, 1), expected).pvalue < 1e-9


def test_the_test_rejects_noise_shared_between_positions():
    table, trials = table_for(SETTINGS["plain"], TRIALS), TRIALS
    history = torch.tensor(PROMPT).expand(trials, -1).contiguous()
    roots = history[:, -1:]
    _, _, first = verify_all(FIRST.expand(trials, 1, -1), [-1], roots, table, history)
    # The second draw at the position of the first: each token alone has the right law, the pair has not.
    _, _, second = verify_all(SECOND[first, None], [-1], roots, table, history)
    assert p_value(torch.stack([first, second], dim=1), exact_law(SETTINGS["plain"])) < 1e-9


@pytest.mark.parametrize("wrong, right", [("plain", "temperature"), ("plain", "penalties"), ("plain", "top_p")])
def test_the_test_rejects_an_ignored_parameter(wrong, right):
    assert p_value(two_tokens(SETTINGS[wrong]), exact_law(SETTINGS[right])) < 1e-9


def test_the_test_rejects_a_distribution_that_is_off_by_three_percent():
    assert p_value(two_tokens(SamplingParams(temperature=1.03)), exact_law(SETTINGS["plain"])) < 1e-6


def test_the_test_rejects_a_tree_that_is_followed_too_often():
    tokens = two_tokens(SETTINGS["plain"])
    others = tokens[:, 0] != 4
    tokens[others & (torch.arange(TRIALS) % 50 == 0), 0] = 4  # the drafted token wins 2 % of the others' draws
    assert p_value(tokens, exact_law(SETTINGS["plain"])) < 1e-9
