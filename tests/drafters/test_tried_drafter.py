from types import SimpleNamespace

import pytest

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_trees.tree import DraftTree
from specengine.drafters import tried_drafter
from specengine.drafters.tried_drafter import TriedDrafter

CONFIG = SimpleNamespace(adaptive=True)
COSTS = CostModel((1, 64), (1.0, 1.0 + 1e-9))


class Slow(TriedDrafter):
    """Drafts one token in no time, but reads prompts for a thousand cycles."""

    name, max_nodes = "slow", 2

    def __init__(self, clock):
        super().__init__(CONFIG, None, None)
        self.clock, self.drafts = clock, 0
        self._try(SimpleNamespace(ops=SimpleNamespace(resident=False)), COSTS)

    def _reads_prompt(self, request):
        return request.drafter_state is None

    def _trees(self, requests, paused):
        self.drafts += not paused
        for request in requests:
            if not paused and self._reads_prompt(request):
                request.drafter_state, self.clock.now = "read", self.clock.now + 1000.0
        return [DraftTree([1], [-1]) if paused else DraftTree([1, 2], [-1, 0]) for _ in requests]


@pytest.fixture
def slow(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tried_drafter.time, "perf_counter", lambda: clock.now)
    return Slow(clock)


def fresh():
    return SimpleNamespace(tokens=[1, 2, 3], drafter_state=None)


def test_a_prompt_that_was_read_is_not_held_against_the_drafts_behind_it(slow):
    for _ in range(5):
        request = fresh()
        for _ in range(20):
            slow.draft([request])
            slow.observe([request], [[5, 6]], None)
    assert slow.drafts == 100


def test_where_every_cycle_reads_a_prompt_that_counts(slow):
    for _ in range(500):
        request = fresh()
        slow.draft([request])
        slow.observe([request], [[5, 6]], None)
    assert slow.drafts < 5
