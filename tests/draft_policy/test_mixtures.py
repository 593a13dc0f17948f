"""The policy on mixtures of experts: no slower than plain decoding, and nearly the best chain in hindsight."""

from copy import deepcopy
from statistics import fmean

import pytest

from specengine.draft_policy import cost_model, policy
from tests.draft_policy.mixtures import MIXTURES, PLANS, SIBLINGS, text_of
from tests.draft_policy.replay import Remembered, adaptive, fixed

ACCEPTED = (0.2, 0.4, 0.6, 0.8, 0.9)
REGRET, LOST = 0.03, 1 / 0.98


def speeds(mixture, right, costs, seed=0, memory=None):
    """Returns the policy's seconds over those of plain decoding, and over those of the best chain."""
    texts, machine = [text_of(right, seed=seed)], mixture.machine
    seconds = adaptive(texts, ["eagle3"], machine, costs=costs, memory=memory)
    plans = [fixed(texts, plan, machine) for plan in PLANS]
    return seconds / plans[0], seconds / min(plans)


def taught(mixture, right):
    """Returns what a policy remembers of another text."""
    memory = Remembered()
    adaptive([text_of(right, seed=100)], ["eagle3"], mixture.machine, costs=mixture.costs, memory=memory)
    return memory


@pytest.mark.full
@pytest.mark.parametrize("name", MIXTURES)
def test_the_policy_loses_nothing_to_plain_decoding_and_little_to_the_best_chain(name):
    found = {right: speeds(MIXTURES[name], right, MIXTURES[name].costs) for right in ACCEPTED}
    assert max(plain for plain, _ in found.values()) <= LOST, found
    assert max(best for _, best in found.values()) <= 1 + REGRET, found
    assert found[0.9][0] < 0.75  # where the best chain is much faster


@pytest.mark.full
@pytest.mark.parametrize("name", MIXTURES)
def test_so_it_is_in_the_mean_of_texts_with_a_past_whatever_their_luck(name):
    mixture, found = MIXTURES[name], {}
    for right in ACCEPTED:
        memory = taught(mixture, right)
        found[right] = [speeds(mixture, right, mixture.costs, seed, deepcopy(memory)) for seed in range(1, 4)]
    assert max(plain for texts in found.values() for plain, _ in texts) <= LOST, found
    assert max(fmean(best for _, best in texts) for texts in found.values()) <= 1 + REGRET, found
    assert max(best for texts in found.values() for _, best in texts) <= 1 + 2 * REGRET, found


def test_a_policy_that_believes_in_its_luck_would_be_noticed(monkeypatch):
    monkeypatch.setattr(policy, "expected_tokens", lambda *_: None)
    mixture = MIXTURES["mixtral-8x7b"]
    assert max(speeds(mixture, 0.8, mixture.costs, seed)[1] for seed in range(2)) > 1 + 2 * REGRET


def test_a_batch_loses_nothing_to_plain_decoding_either():
    found, machine = {}, SIBLINGS.machine
    for right in (0.2, 0.6, 0.9):
        texts = [text_of(right, 300, seed) for seed in range(8)]
        seconds = [adaptive(texts, ["eagle3"], machine, 4, costs=costs) for costs in (SIBLINGS.costs, None)]
        plain = fixed(texts, PLANS[0], machine, 4)
        found[right] = [each / plain for each in seconds]
    assert max(mixture for mixture, _ in found.values()) <= LOST, found
    assert found[0.2][1] > 1.1 and found[0.9][0] < 0.9, found


def test_costs_of_a_dense_model_would_lose_to_plain_decoding():
    found = [speeds(MIXTURES["gpt-oss-20b"], right, None)[0] for right in (0.4, 0.6)]
    assert min(found) > 1.1, found


def test_a_level_that_must_pay_alone_would_be_noticed(monkeypatch):
    monkeypatch.setattr(cost_model, "AHEAD", (1,))
    mixture = MIXTURES["qwen3-30b-a3b"]
    assert speeds(mixture, 0.9, mixture.costs)[1] > 1 + REGRET


def test_the_exponent_is_that_of_the_passes():
    costs = MIXTURES["qwen3-30b-a3b"].costs
    speeds(MIXTURES["qwen3-30b-a3b"], 0.8, costs)
    assert costs.experts.exponent == pytest.approx(0.7, abs=0.02)
