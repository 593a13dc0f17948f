"""Goals of a GPU: values are read from the results of each step, and results without a value give none."""

import json
import re

import pytest

from tests.bench.gpu_scripts import ROOT, loaded


@pytest.fixture(scope="module")
def targets():
    return loaded("targets")


def run_of(**drafters):
    """Results of a run of drafters, each with its milliseconds by phase."""
    seconds = {"tokens": 256, "seconds": 1.5, "prefill_seconds": 0.5, "peer": None}
    named = {name.replace("__", ",k=10,cost="): ms for name, ms in drafters.items()}
    return {
        "device": "cuda:0",
        "runs": [{**seconds, "drafter": name, "ms_per_cycle": {"host": 0.02, **ms}} for name, ms in named.items()],
    }


def values(found):
    return {target.name: target.value and round(target.value, 6) for target in found}


def verdicts(found):
    return [target.met for target in found]


def test_plain_decoding_is_judged_by_speed_cycle_and_host(targets):
    found = list(targets.plain(run_of(none={"verify": 3.6})))
    assert values(found) == {
        "plain decoding": 256,
        "plain decoding, a cycle": 3.62,
        "plain decoding, host between two cycles": round(2 / 3.62, 6),
    }
    assert [target.goal for target in found] == [270, 3.7, 1]
    assert verdicts(found) == [False, True, True]


def test_the_pass_of_sixty_is_compared_with_the_pass_of_one(targets):
    rows = [{"rows": 1, "ms": 4.0, "ratio": 1.0}, {"rows": 60, "ms": 4.2, "ratio": 1.05}]
    found = list(targets.passes({"rows": rows}))
    assert values(found) == {"pass of 60 nodes over pass of one": 1.05, "pass of 1": 4.0, "pass of 60": 4.2}
    assert verdicts(found) == [True, None, None]
    rows[1]["ratio"] = 1.06
    assert verdicts(targets.passes({"rows": rows}))[0] is False
    assert verdicts(targets.passes({"rows": rows[:1]}))[0] is None


def test_the_host_of_a_pass_over_a_prompt_has_a_goal_and_both_ways_are_shown(targets):
    found = list(targets.prompts({"host_ms": 1.5, "measured": [["64 rows behind 0: kernel", 7.0, "us"]]}))
    assert values(found) == {"pass over a prompt, the host's calls": 1.5, "64 rows behind 0: kernel": 7.0}
    assert verdicts(found) == [False, None] and verdicts(targets.prompts({})) == [None]


def test_a_cycle_is_read_without_the_phase_that_only_synthetic_drafters_have(targets):
    results = run_of(
        none={"verify": 3.6},
        synthetic__eagle3={"draft": 1.0, "verify": 3.98, "bend": 0.5},
        synthetic__fasteagle={"draft": 1.0, "expand": 0.02, "verify": 3.86, "accept": 0.05, "compact": 0.05},
    )
    chain = list(targets.cycle_of("chain", "k=10,cost=eagle3", 5.2)(results))
    assert values(chain) == {
        "cycle, chain": 5.0,
        "chain: verification, compaction, expansion": None,
        "chain: host between two cycles": 0.4,
    }
    assert verdicts(chain) == [True, None, True]
    tree = list(targets.cycle_of("tree", "k=10,cost=fasteagle", 4.9)(results))
    assert values(tree)["tree: verification, compaction, expansion"] == 2.4
    assert verdicts(tree) == [False, True, True]
    both = targets.both(targets.plain, targets.cycle_of("tree", "cost=fasteagle", None))(results)
    assert len(list(both)) == 6


def test_a_batch_is_judged_by_its_cycle(targets):
    assert verdicts(targets.batch(run_of(none={"verify": 7.7}))) == [True, None]
    assert verdicts(targets.batch(run_of(none={"verify": 7.9})))[0] is False


def test_a_drafter_whose_drafts_fail_is_compared_with_plain_decoding(targets):
    results = run_of(none={}, eagle3={})
    results["runs"][1]["seconds"] = 2.5  # of them 0.5 for the prompt: half the speed
    assert values(targets.fallback(results)) == {"a drafter whose drafts fail, over plain decoding": 0.5}


def test_kernels_are_judged_beside_pytorch(targets):
    rows = [
        {"kernel": "linear", "bandwidth_fraction": 0.8, "speedup": 1.2},
        {"kernel": "linear", "bandwidth_fraction": 0.6, "speedup": 0.9},
    ]
    found = list(targets.kernels({"kernels": rows}))
    assert values(found) == {"linear: mean share of memory's speed": 70.0, "cases faster than PyTorch": 50.0}
    assert verdicts(found) == [None, False]


def test_a_peer_s_speed_is_divided_by(targets):
    results = run_of(none={"verify": 3.6})
    results["runs"].append({**results["runs"][0], "peer": "transformers", "seconds": 3.0})
    (found,) = targets.peers(results)
    assert (found.name, found.value, found.met) == ("plain decoding over transformers", 2.0, True)


def test_results_without_values_are_not_measured_and_judge_nothing(targets):
    cycle = targets.cycle_of("chain", "cost=eagle3", 5.2)
    for read in (targets.plain, targets.passes, targets.batch, targets.fallback, targets.kernels, cycle):
        found = list(read({}))
        assert found and {target.value for target in found} == {None}
        assert {target.met for target in found} == {None}
        assert all("not measured" in target.line() for target in found)
    assert list(targets.peers({})) == list(targets.listed({})) == []


def test_a_line_has_value_goal_and_verdict(targets):
    target = targets.Target("plain decoding", 217.4, 270, "tokens/s", at_least=True)
    assert " ".join(target.line().split()) == "plain decoding: 217.4 tokens/s goal at least 270 tokens/s NO"
    free = targets.Target("memory", 140.0, None, "GiB")
    assert " ".join(free.line().split()) == "memory: 140 GiB" and free.met is None
    assert json.loads(json.dumps(target.entry()))["met"] is False


def test_every_goal_of_the_page_is_a_goal_of_a_step(targets):
    results = run_of(none={"verify": 1.0}, one={"verify": 1.0})
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    steps = loaded("steps").steps(dry=False)
    goals = {target.goal for step in steps for target in step.reading(results)} - {None}
    for goal in (270, 1.05, 5.2, 5.0, 7.8):
        assert goal in goals and re.search(rf"\| {goal:g} .*\|$", page, re.MULTILINE)
