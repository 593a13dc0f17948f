"""The experts that passes read, learned from counts that are given, and what they add to the seconds of a cycle."""

from random import Random

import numpy as np
import pytest

from specengine.draft_policy.cost_model import ROWS, CycleCosts
from specengine.draft_policy.expert_reads import EXPONENT, ExpertReads

CHAINS, SIBLINGS = 0.74, 0.95  # siblings share fewer experts than neighbours of a text do


def reads_of(experts=128, per_token=8, share=0.6):
    return ExpertReads(experts, per_token, share)


@pytest.mark.parametrize("exponent", [CHAINS, SIBLINGS])
def test_the_exponent_is_learned_from_counts_of_passes_of_any_size(exponent):
    reads, draw = reads_of(), Random(0)
    for _ in range(100):
        rows = draw.choice([1, 2, 3, 5, 9])
        reads.observe(rows, 8 * rows**exponent * draw.uniform(0.9, 1.1))
    assert reads.exponent == pytest.approx(exponent, abs=0.02)


def test_one_pass_teaches_much_and_a_hundred_forget_what_was_before():
    reads = reads_of()
    reads.observe(8, 8 * 8**SIBLINGS)
    assert SIBLINGS - 0.03 < reads.exponent < SIBLINGS
    for _ in range(200):
        reads.observe(8, 8 * 8**CHAINS)
    assert reads.exponent == pytest.approx(CHAINS, abs=0.02)


def test_a_pass_of_one_row_and_one_that_reads_every_expert_teach_what_they_show():
    reads = reads_of(experts=8, per_token=2)
    reads.observe(1, 2.0)
    assert reads.exponent == EXPONENT
    reads.observe(16, 8.0)  # as the law says, and so it would with any larger exponent
    assert reads.exponent == EXPONENT
    reads.observe(3, 8.0)  # more than the law says
    assert reads.exponent > EXPONENT


def test_rows_add_the_bytes_of_their_experts_and_no_more_than_all_of_them():
    reads = reads_of(experts=32, per_token=8, share=0.5)
    added = reads.added(np.array([1, 2, 4, 64, 1024]))
    assert added == pytest.approx([0, 0.5 * (2**EXPONENT - 1), 0.5 * (4**EXPONENT - 1), 1.5, 1.5])


def test_a_cycle_is_predicted_from_the_bytes_of_a_mixture_and_of_a_dense_model_as_ever():
    """Qwen3-30B-A3B: 1.23 GB dense and 1.81 GB of experts a row, formats of equal bits."""
    costs = CycleCosts(experts=reads_of(share=1.81 / 3.04))
    seconds, dense = costs.curve(1, 100), CycleCosts().curve(1, 100)
    added = [(seconds(rows - 1) - dense(rows - 1)) / ROWS[1] for rows in (1, 2, 4, 8)]
    assert added == pytest.approx([0, 0.42, 1.13, 2.36], abs=0.01)
    assert CycleCosts(experts=reads_of(share=0.0)).curve(3, 100).points == CycleCosts().curve(3, 100).points


def test_counts_change_what_was_never_measured_and_not_what_was():
    costs = CycleCosts(experts=reads_of())
    for _ in range(300):
        costs.observe(costs.curve(1, 100), 100, 0, 3.0e-3, 8.0)
        costs.observe(costs.curve(1, 100), 100, 1, 4.5e-3, 8 * 2**SIBLINGS)
    known = costs.curve(1, 100)
    unlearned = CycleCosts(experts=reads_of())
    unlearned.known = costs.known
    before = unlearned.curve(1, 100)
    assert [known(nodes) for nodes in (0, 1)] == pytest.approx([before(nodes) for nodes in (0, 1)])
    assert known(7) > 1.1 * before(7)


def test_cycles_are_recorded_by_rows_with_what_was_predicted():
    costs = CycleCosts(experts=reads_of())
    for seconds in (3.0e-3, 6.0e-3):  # the first shows the speed
        costs.observe(costs.curve(1, 100), 100, 0, seconds, 8.0)
    costs.observe(costs.curve(1, 100), 100, 3, 9.0e-3, 20.0)
    costs.observe(costs.curve(1, 100), 100, 3, 9.0e-3)  # without a count
    one, four = costs.experts.passes[1], costs.experts.passes[4]
    assert (one.passes, one.experts, one.measured) == (2, 16.0, pytest.approx(9.0e-3))
    assert one.predicted == pytest.approx(6.0e-3) and (four.passes, four.experts) == (1, 20.0)
    assert four.predicted > 1.5 * 3.0e-3 and sorted(costs.experts.passes) == [1, 4]


def test_more_rows_never_take_less_whatever_was_measured():
    for seed in range(60):
        draw = Random(seed)
        costs = CycleCosts(experts=reads_of(draw.choice([8, 32, 128]), draw.choice([2, 4]), draw.uniform(0.3, 0.95)))
        for _ in range(30):
            curve, nodes = costs.curve(1, 100), draw.choice([0, 1, 3, 4, 7, 9, 15, 20])
            costs.observe(curve, 100, nodes, curve(nodes) * draw.uniform(0.7, 1.4))
        curve = costs.curve(1, 100)
        seconds = np.array([curve(nodes) for nodes in range(200)])
        assert (np.diff(seconds) > -1e-12).all(), seed
        bits = [1 << bit for bit in range(8)]
        assert seconds[[rows - 1 for rows in bits]] == pytest.approx(curve.points[:8])  # measured points stay
