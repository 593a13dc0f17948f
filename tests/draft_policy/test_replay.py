"""The policy against the best fixed plan in hindsight, on recorded drafts and without clocks."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from statistics import fmean

import pytest

from specengine.draft_policy import policy
from tests.draft_policy.ablations import MACHINES, SOURCES
from tests.draft_policy.replay import PLANS, Machine, Plan, Remembered, Text, adaptive, fixed, load

REGRET = 0.03
TEXTS = load()
EASY, HARD = ("edit", "extraction"), ("writing", "advice")
TRACES: dict[str, tuple[list[Text], int]] = {
    "easy": ([text for text in TEXTS if text.kind in EASY] * 6, 1),
    "hard": ([text for text in TEXTS if text.kind in HARD] * 6, 1),
    "mixed": (TEXTS * 2, 1),
    "very short": ([text.cut(12) for text in TEXTS] * 8, 1),
    "batched": (TEXTS * 3, 3),
}


def regret(trace: str, names: list[str], machine: Machine, memory: Remembered | None = None) -> float:
    """How much longer the policy takes than the best fixed plan of its sources, as a share."""
    texts, batch = TRACES[trace]
    plans = [plan for plan in PLANS if plan.source in (None, *names)]
    return adaptive(texts, names, machine, batch, memory) / min(fixed(texts, p, machine, batch) for p in plans) - 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("names", SOURCES, ids="+".join)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_policy_with_a_past_is_no_slower_than_the_best_fixed_plan(machine, names):
    memory = Remembered()
    adaptive(TEXTS * 2, names, MACHINES[machine], memory=memory)
    regrets = {trace: round(regret(trace, names, MACHINES[machine], deepcopy(memory)), 3) for trace in TRACES}
    assert max(regrets.values()) <= REGRET, regrets


@pytest.mark.parametrize("names", SOURCES, ids="+".join)
def test_a_policy_without_a_past_soon_is_no_slower_either(names):
    assert regret("mixed", names, Machine()) <= REGRET


def test_a_policy_that_takes_everything_would_be_noticed(monkeypatch):
    monkeypatch.setattr(policy.DraftPolicy, "_pays", lambda *_: True)
    assert regret("mixed", ["eagle3"], MACHINES["dear network"]) > 3 * REGRET


def test_parts_that_are_good_at_different_texts_are_faster_together_than_any_fixed_plan():
    gains = []
    for seed in range(4):
        past, texts, memory = TEXTS * 3, TEXTS * 2, Remembered()
        Random(seed).shuffle(past)
        Random(seed + 10).shuffle(texts)
        adaptive(past, ["suffix", "eagle3"], memory=memory)
        best = min(fixed(texts, plan) for plan in PLANS)
        gains.append(best / adaptive(texts, ["suffix", "eagle3"], memory=memory))
    assert fmean(gains) > 1 / 0.95, gains


def test_a_fixed_plan_takes_what_its_costs_say():
    (text, *_) = TEXTS
    assert fixed([text], Plan(), Machine(jitter=0)) == pytest.approx(len(text.tokens) * 3.0e-3)
