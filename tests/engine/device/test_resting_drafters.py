"""Drafters on the host between two cycles: what they take where their drafts are refused, and when they are asked."""

from types import SimpleNamespace

import pytest

from specengine import SamplingParams
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.policy import DraftPolicy
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.drafter import Drafter
from specengine.drafters.none import NoneDrafter
from specengine.drafters.suffix.config import Config
from specengine.drafters.suffix.drafter import Suffix
from specengine.engine.device.device_batch import DeviceBatch
from specengine.rules.base import Wants
from tests.drafters.requests import sequence_of
from tests.drafters.steady import steady
from tests.engine.device.prompts import on_the_cpu
from tests.engines import ids

CYCLES, ROW, DRAFT, HOST = 3000, 0.01, 0.5, 0.05  # seconds; a cycle takes one, and its rows beyond the first


class Machine:
    """A device that refuses all drafts and says 1 again and again, with a clock; it runs cycles behind the host.

    asked: while how many cycles were under way.
    """

    def __init__(self, drafter=None) -> None:
        self.now = self.free = 0.0
        self.under_way, self.widths, self.asked = 0, [], []
        self.drafter, self.wants, self.loaded, self.buffers = drafter, Wants.NOTHING, None, None
        self.slots = SimpleNamespace(place=lambda requests, size: [*range(len(requests))], take_out=lambda _: None)
        batch = SimpleNamespace(take=lambda draft, slots: None, hidden_states=None)
        self.graphs = SimpleNamespace(
            bucket=lambda size: size,
            choose=lambda size: 1,
            width_for=lambda size, nodes: nodes,
            of=lambda *_: batch,
            logits=lambda *_: None,
            observe=lambda *_: None,
        )

    def launch(self, size, nodes, constraints=()):
        self.widths.append(nodes)
        self.now += HOST
        self.free = done = max(self.now, self.free) + 1 + ROW * (size * nodes - size)
        self.under_way += 1

        def read():
            self.now, self.under_way = max(self.now, done), self.under_way - 1
            rest = [-1] * (nodes - 1)
            return [[0, 1, 1, 0, *[0, *rest], *[1, *rest], *[-1, *rest]] for _ in range(size)]

        return read

    def run(self, requests=1):
        """Returns the seconds of CYCLES cycles."""
        batch = DeviceBatch([sequence_of([1], limit=2 * CYCLES) for _ in range(requests)], self)
        for _ in range(CYCLES):
            batch.step()
        batch.close()
        assert {len(request.tokens) for request in batch.requests} == {1 + len(self.widths)}
        return self.now


class Wrong(Drafter):
    """Drafts on the host what is never accepted."""

    name, max_nodes = "wrong", 5

    def __init__(self, machine, adaptive=True) -> None:
        self.machine = machine
        self.policy = DraftPolicy([], 4, adaptive=adaptive, clock=lambda: machine.now)

    def draft(self, requests):
        self.machine.asked.append(self.machine.under_way)
        return self.policy.draft_whole(requests, lambda drafts: self._trees(requests, drafts))

    def observe(self, draft, committed, hidden_states):
        assert hidden_states is None
        self.policy.observe(draft, committed)

    def _trees(self, requests, drafts):
        self.machine.now += DRAFT * drafts
        tree = DraftTree([1, 2, 2, 2, 2], [-1, 0, 1, 2, 3]) if drafts else DraftTree([1], [-1])
        return [tree for _ in requests]


@pytest.mark.parametrize("requests", [1, 4])
def test_drafts_that_are_never_accepted_take_a_fiftieth_of_the_time_at_most(requests):
    plain, (seconds, machine) = Machine(NoneDrafter(None, None, None)).run(requests), run_with(Wrong, requests)
    assert seconds <= 1.02 * plain
    assert 20 < sum(width > 1 for width in machine.widths) < CYCLES / 30  # explored again and again
    assert CYCLES / 20 < len(machine.asked) < CYCLES / 10
    assert set(machine.asked) == {0}  # what a cycle says is known before the next draft


def test_without_a_policy_they_take_half_of_the_time():
    seconds, machine = run_with(lambda machine: Wrong(machine, adaptive=False), 1)
    assert seconds > 1.5 * CYCLES and len(machine.asked) == CYCLES


def run_with(make, requests):
    machine = Machine()
    machine.drafter = make(machine)
    return machine.run(requests), machine


def test_a_host_drafters_trees_are_cut_on_the_device_and_it_is_asked_rarely(device_engine):
    params, prompt = SamplingParams(max_new_tokens=16, trace=True), [5, 9, 13, 5, 9, 40] * 4
    target = device_engine("none").model.target
    found = {}
    for row in (1e-6, 0.5):  # seconds beside one of a cycle
        drafter = steady(Suffix(Config(), None, target, CycleCosts({1: 1.0, 2: 1 + row, 256: 1 + 255 * row})))
        asked, propose = [], drafter.propose
        drafter.propose = lambda *given, asked=asked, propose=propose: asked.append(1) or propose(*given)
        (output,) = device_engine(drafter).generate([prompt], params)
        assert ids([output]) == ids(on_the_cpu(params, prompts=[prompt]))
        found[row] = [len(cycle.tokens) for cycle in output.trace], len(asked)
    (free, often), (dear, rarely) = found.values()
    assert often == len(free) and sum(size > 1 for size in free) >= 4 and max(free) > max(dear)
    assert rarely <= 5 and sum(size > 1 for size in dear) <= 2
