"""The policy on mixtures of experts: no slower than plain decoding, and nearly the best chain in hindsight."""

import pytest

from specengine.draft_policy import cost_model
from tests.draft_policy.mixtures import MIXTURES, PLANS, SIBLINGS, text_of
from tests.draft_policy.replay import Remembered, adaptive, fixed

ACCEPTED = (0.2, 0.4, 0.6, 0.8, 0.9)
REGRET, LOST = 0.03, 1 / 0.98


def speeds(mixture, right, costs, memory=None):
    """Returns the policy's seconds over those of plain decoding, and over those of the best chain."""
    texts, machine = [text_of(right)], mixture.machine
    seconds = adaptive(texts, ["eagle3"], machine, costs=costs, memory=memory)
    plans = [fixed(texts, plan, machine) for plan in PLANS]
    return seconds / plans[0], seconds / min(plans)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_policy_loses_nothing_to_plain_decoding_and_little_to_the_best_chain(name):
    found = {right: speeds(MIXTURES[name], right, MIXTURES[name].costs) for right in ACCEPTED}
    assert max(plain for plain, _ in found.values()) <= LOST, found
    assert max(best for _, best in found.values()) <= 1 + REGRET, found
    assert found[0.9][0] < 0.75  # where the best chain is much faster


def test_rows_that_share_few_experts_are_verified_where_they_pay():
    found = {right: speeds(SIBLINGS, right, SIBLINGS.costs) for right in ACCEPTED}
    assert max(plain for plain, _ in found.values()) <= LOST, found
    assert found[0.9][0] < 0.8 and max(best for _, best in found.values()) <= 1 + 1.5 * REGRET, found


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
    speeds(MIXTURES["qwen3-30b-a3b"], 0.8, costs, Remembered())
    assert costs.experts.exponent == pytest.approx(0.7, abs=0.02)
