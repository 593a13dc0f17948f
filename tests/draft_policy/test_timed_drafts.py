from types import SimpleNamespace

import pytest

from specengine.draft_policy import trial
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.trial import TimedDrafts
from specengine.draft_trees.tree import DraftTree

COSTS = CostModel((1, 64), (1.0, 1.0 + 1e-9))


class Slow:
    """Drafts one token in no time, but reads prompts for a thousand cycles."""

    def __init__(self, clock):
        self.clock, self.drafts, self.timed = clock, 0, TimedDrafts(COSTS)

    def reads_prompt(self, request):
        return request.drafter_state is None

    def draft(self, requests):
        return self.timed.draft(requests, lambda skipped: self.trees(requests, skipped), self.reads_prompt)

    def observe(self, committed):
        self.timed.observe(committed)

    def trees(self, requests, skipped):
        self.drafts += not skipped
        for request in requests:
            if not skipped and self.reads_prompt(request):
                request.drafter_state, self.clock.now = "read", self.clock.now + 1000.0
        return [DraftTree([1], [-1]) if skipped else DraftTree([1, 2], [-1, 0]) for _ in requests]


@pytest.fixture
def slow(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: clock.now)
    return Slow(clock)


def fresh():
    return SimpleNamespace(tokens=[1, 2, 3], drafter_state=None)


def test_a_prompt_that_was_read_is_not_held_against_the_drafts_behind_it(slow):
    for _ in range(5):
        request = fresh()
        for _ in range(20):
            slow.draft([request])
            slow.observe([[5, 6]])
    assert slow.drafts == 100


def test_where_every_cycle_reads_a_prompt_that_counts(slow):
    for _ in range(500):
        request = fresh()
        slow.draft([request])
        slow.observe([[5, 6]])
    assert slow.drafts < 5
