"""The seconds of cycles, learned from cycles whose seconds are given."""

import pytest

from specengine.draft_policy.cost_model import ROWS, CycleCosts, followed

PRIOR = {1: 1.0, 2: 1.5, 4: 2.5, 8: 4.5, 1024: 512.5}  # half a second, and half of one per row


def curve(costs, requests=1, most=64, prefix=100):
    seconds = costs.curve(requests, prefix)
    return [seconds(nodes) for nodes in range(most)]


def measured(costs, nodes, seconds, times=1, requests=1, prefix=100):
    for _ in range(times):
        costs.observe(costs.curve(requests, prefix), prefix, nodes, seconds)


def test_before_any_measurement_the_prior_counts_between_its_points_too():
    assert curve(CycleCosts(PRIOR), most=8) == pytest.approx([0.5 + 0.5 * rows for rows in range(1, 9)])
    assert curve(CycleCosts(PRIOR), requests=4, most=4) == pytest.approx([2.5, 3.0, 3.5, 4.0])
    assert curve(CycleCosts())[0] == ROWS[1]


def test_more_nodes_never_take_less():
    costs = CycleCosts({1: 1.0, 2: 3.0, 4: 2.0, 8: 5.0})
    seconds = curve(costs, most=16)
    assert seconds == sorted(seconds) and seconds[3] == 3.0
    measured(costs, 0, 1.0, 5)
    measured(costs, 31, 0.5, 200)
    assert curve(costs) == sorted(curve(costs))


def test_a_measured_cycle_moves_the_points_beside_it():
    costs = CycleCosts(PRIOR)
    measured(costs, 0, 1.0)  # the speed of the prior
    before = curve(costs)
    for _ in range(300):
        measured(costs, 5, 2 * 3.5)
        measured(costs, 0, 1.0)  # so that the machine is not held for slower
    after = curve(costs)
    assert after[5] / after[0] == pytest.approx(7.0, rel=0.1)
    assert after[3] > 1.2 * before[3] and after[7] > 1.2 * before[7]
    assert after[0] < 1.2 * before[0]


def test_unmeasured_rows_keep_the_prior_s_shape_between_and_beyond_measured_ones():
    costs = CycleCosts(PRIOR)
    for _ in range(300):
        measured(costs, 0, 1.0)
        measured(costs, 7, 9.0)
    seconds = curve(costs)
    assert seconds[31] / seconds[7] == pytest.approx(16.5 / 4.5)
    assert seconds[1] / seconds[0] == pytest.approx(1.5 * (1 + 1 / 3))  # 8 rows are twice the prior, 1 row is it


def test_a_hiccup_counts_at_most_double():
    assert followed(1.0, 1000.0) == followed(1.0, 2.0) > 1.0 > followed(1.0, 0.5)
    hiccup, double = CycleCosts(PRIOR), CycleCosts(PRIOR)
    for costs, seconds in ((hiccup, 1e4), (double, 4.0)):
        measured(costs, 1, 1.5, 5)
        measured(costs, 1, seconds)
    assert hiccup.speed == double.speed < 1.2
    assert curve(hiccup) == curve(double)
    assert max(a / b for a, b in zip(curve(hiccup), curve(CycleCosts(PRIOR)), strict=True)) < 1.1


def test_the_speed_follows_a_machine_that_becomes_twice_as_slow_and_the_ratios_stay():
    costs = CycleCosts(PRIOR)
    for slow in (1, 2):
        for _ in range(60):
            for nodes in (0, 1, 3, 7):
                measured(costs, nodes, slow * (1 + nodes / 2))
    now = [costs.speed * seconds for seconds in curve(costs, most=8)]
    assert now == pytest.approx([2 + nodes for nodes in range(8)], rel=0.05)


def test_batches_and_prefixes_learn_apart_and_a_new_one_begins_at_the_nearest():
    costs = CycleCosts(PRIOR)
    for _ in range(300):
        measured(costs, 0, 1.0, prefix=100)
        measured(costs, 7, 13.5, prefix=100)  # three times the prior
        measured(costs, 0, 1.0, prefix=10_000)
        measured(costs, 7, 4.5, prefix=10_000)
    near, far = (curve(costs, prefix=prefix) for prefix in (100, 10_000))
    assert near[7] / near[0] > 2 * far[7] / far[0]
    assert curve(costs, prefix=1_000_000) == far and curve(costs, prefix=1) == near
    assert curve(costs, requests=2, prefix=100)[6] == near[7]
