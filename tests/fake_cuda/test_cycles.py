"""Every drafter's and rule's cycle as a GPU captures it: no call waits for the device, and launches are as recorded."""

import dataclasses

import pytest

from specengine.drafters.drafter import Drafter
from specengine.drafters.none import NoneDrafter
from tests.fake_cuda.cases import CASES, CATCH_UP, DRAFTERS, launches_of, recorded, totals
from tests.fake_cuda.refused import Refused

PLAIN = 10  # launches that a cycle of width 1 may have beyond plain decoding: hidden states are kept
AROUND = 8  # launches of plain decoding outside of its layers
CHAIN_OF_7 = 60  # launches that EAGLE-3 adds to plain decoding for a chain of seven
GROWN = "more launches than tests/fake_cuda/launches.json; if they are needed: python -m tests.fake_cuda.record"
# PyTorch's kernels in a cycle beside products: where layers are put in order, where a given tree lacks candidates,
# where masks have a hidden state, and where a rule reads the distributions of drawn children.
DRAWN = ["zeros", "sub", "clamp", "cat", "_to_copy", "gather", "ge", "lt", "bitwise_and", "scalar_tensor", "where"]
OTHERS = {
    **{f"draft_model, {rule}": DRAWN for rule in ("rejection", "block", "traversal", "cascade", "bild", "lossy")},
    "eagle3, layers out of order": ["index"],
    "eagle, a given tree": ["scalar_tensor", "where"],
    "p_eagle": ["cat"],
}
CHAINS = {"eagle3, a chain of 7": 7, "eagle": 3, "glide": 4}  # levels of drafters that make a pass for each


def of_one_request(machine, folders, name, width):
    case = CASES[name]
    return machine.engine(machine.target(), case.spec.format(**folders), case.rule).captured(width, 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CASES)
def test_a_cycle_can_be_captured_and_launches_no_more_than_recorded(machine, folders, name):
    launches = launches_of(machine, machine.target(), CASES[name], folders)
    found, most = totals(launches), recorded()[name]
    assert found.keys() == most.keys()
    for width, counts in found.items():
        for kind, count in counts.items():
            assert count <= most[width][kind], f"width {width}: {kind}: {GROWN}\n{launches[width]}"
    assert found == most, "fewer launches: python -m tests.fake_cuda.record"
    for width, own in launches.items():
        assert width == CATCH_UP or {*own.torch} <= {"mm", *OTHERS.get(name, ())}, f"width {width}: {own}"


@pytest.mark.parametrize("name", ["fasteagle", "medusa"])
def test_drawn_children_are_captured(machine, folders, name):
    spec = f"{DRAFTERS[name]},sample=true".format(**folders)
    launches = machine.engine(machine.target(), spec, "rejection").captured(4)
    assert launches.ours["draw_siblings"] == launches.ours["grow_level"] == 3  # of a level each


def test_width_1_costs_hardly_more_than_plain_decoding():
    cases = recorded()
    plain = sum(cases["none"]["1"].values())
    for name in {*cases} - {name for name, case in CASES.items() if case.rule != "match"}:
        assert sum(cases[name]["1"].values()) <= plain + PLAIN, name


@pytest.mark.parametrize("name", CHAINS)
def test_no_level_is_drafted_that_a_width_has_no_room_for(machine, folders, name):
    ours = {width: of_one_request(machine, folders, name, width).ours.total() for width in (2, 4, 8)}
    level = (ours[4] - ours[2]) // 2
    assert level >= 5  # a layer's launches
    for width, count in ours.items():
        assert count == ours[2] + level * (min(CHAINS[name], width - 1) - 1)


def test_a_layer_of_plain_decoding_has_five_launches(machine, folders):
    layers = machine.target().config.num_layers
    assert of_one_request(machine, folders, "none", 1).total <= 5 * layers + AROUND


def test_a_chain_of_seven_adds_few_launches(machine, folders):
    plain = of_one_request(machine, folders, "none", 1).total
    assert of_one_request(machine, folders, "eagle3, a chain of 7", 8).total <= plain + CHAIN_OF_7


@pytest.mark.parametrize("name, width", [("eagle3", 1), ("eagle3, a chain of 7", 8), ("eagle3", 8)])
def test_only_trees_that_branch_have_paths_to_move(machine, folders, name, width):
    moves = of_one_request(machine, folders, name, width).ours["compact_kv"]
    assert moves == (name == "eagle3" and width > 1)


class Careless(NoneDrafter):
    """Makes a call of its own."""

    def __init__(self, call):
        Drafter.__init__(self, None, None, None)
        self._call = call

    def draft_on_device(self, batch):
        self._call(batch)
        return super().draft_on_device(batch)


def with_drafter(engine, drafter):
    return dataclasses.replace(engine, cycle=dataclasses.replace(engine.cycle, drafter=drafter))


def test_a_planted_wait_in_a_drafter_is_found(machine):
    engine = machine.engine(machine.target(), "none")
    with pytest.raises(Refused, match=r"_local_scalar_dense: reads a number"):
        with_drafter(engine, Careless(lambda batch: int(batch.history.length[0]))).captured(1)


def test_a_planted_launch_is_counted(machine):
    engine = machine.engine(machine.target(), "none")
    more = with_drafter(engine, Careless(lambda batch: batch.history.length + 1))
    assert more.captured(1).total == engine.captured(1).total + 1


@pytest.mark.parametrize("name", ["tiny-qwen2-moe", "tiny-olmoe", "tiny-gpt-oss"])
def test_a_cycle_can_be_captured_whose_target_is_a_mixture_of_experts(machine, name):
    target = machine.target(name=name)
    launches = machine.engine(target, DRAFTERS["prompt_lookup"]).captured(8).ours
    once = ["router_logits", "choose_experts", "group_pairs", "combine_experts"]
    once += ["clamped_swiglu"] if target.config.moe.swiglu_limit else []
    assert [launches[name] for name in once] == [target.config.num_layers] * len(once)
    assert launches["expert_linear"] == 2 * target.config.num_layers


def test_a_cycle_can_be_captured_where_the_library_multiplies(machine, folders):
    engine = machine.engine(machine.target(by_library=True), DRAFTERS["eagle3"].format(**folders))
    launches = engine.captured(8)
    assert "linear" not in launches.ours and launches.torch["mm"] > 10
