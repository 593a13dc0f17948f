"""Every drafter's cycle as a GPU captures it: no call that waits for the device, and no more launches than recorded."""

import pytest

from specengine.drafters.base import Drafter
from specengine.drafters.capabilities import DeviceDrafter
from specengine.drafters.none import NoneDrafter
from tests.fake_cuda.cases import SPECS, launches_by_width, recorded, totals
from tests.fake_cuda.refused import Refused

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")
PLAIN = 10  # launches that a cycle of width 1 may have beyond plain decoding: three hidden states, and what waits
GROWN = "more launches than tests/fake_cuda/launches.json; if they are needed: python -m tests.fake_cuda.record"


@pytest.mark.parametrize("name", SPECS)
def test_a_cycle_can_be_captured_and_launches_no_more_than_recorded(machine, drafters, name):
    launches = launches_by_width(machine, machine.target(), SPECS[name].format(**drafters))
    found, most = totals(launches), recorded()[name]
    assert found.keys() == most.keys()
    for nodes, counts in found.items():
        for kind, count in counts.items():
            assert count <= most[nodes][kind], f"width {nodes}: {kind}: {GROWN}\n{launches[int(nodes)]}"
    assert found == most, "fewer launches: python -m tests.fake_cuda.record"


def test_width_1_costs_hardly_more_than_plain_decoding():
    plain = sum(recorded()["none"]["1"].values())
    for name, widths in recorded().items():
        assert sum(widths["1"].values()) <= plain + PLAIN, name


@pytest.mark.parametrize("name", ["eagle3", "fasteagle", "medusa", "glide"])
def test_no_level_is_drafted_that_a_width_has_no_room_for(machine, drafters, name):
    target = machine.target()
    engine = machine.engine(target, SPECS[name].format(**drafters))
    levels = []
    cut = type(engine.batch(4)).selected

    def watched(batch, tokens, parents, depths, *rest):
        found, above = [0], parents.shape[1]
        levels.append(above)
        return cut(batch, tokens, parents, depths, *rest)

    for nodes in (2, 3, 4):
        batch = engine.batch(nodes)
        batch.selected = watched.__get__(batch)
        engine.cycle.run(batch)
    assert levels == sorted(levels)


class Careless(NoneDrafter):
    """Makes a call that a graph refuses."""

    def __init__(self, call):
        Drafter.__init__(self, None, None, None)
        self._call = call

    def draft_on_device(self, batch):
        self._call(batch)
        return super().draft_on_device(batch)


def test_a_planted_wait_in_a_drafter_is_found(machine):
    target = machine.target()
    engine = machine.engine(target, "none")
    careless = Careless(lambda batch: int(batch.history.length[0]))
    assert isinstance(careless, DeviceDrafter)
    object.__setattr__(engine.cycle, "drafter", careless)
    with pytest.raises(Refused, match=r"_local_scalar_dense: reads a number"):
        engine.captured(1)
