"""How many forced tokens are verified."""

from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.expert_reads import EXPONENT, ExpertReads
from specengine.draft_policy.forced import ForcedPolicy, ForcedRun

COSTS = {1: 10e-3, 2: 11e-3, 4: 13e-3, 8: 17e-3, 1024: 1.033}  # a row takes a tenth of a cycle


def policy(costs=COSTS) -> ForcedPolicy:
    return ForcedPolicy(CycleCosts(costs))


def test_tokens_behind_the_root_are_sure_and_all_taken_as_far_as_there_is_room():
    assert policy().lengths([ForcedRun(0, 0, 9)], [20], 0, 100) == [9]
    assert policy().lengths([ForcedRun(0, 0, 9)], [4], 0, 100) == [4]
    assert policy().lengths([ForcedRun(0, 0, 9), ForcedRun(1, 0, 3)], [5, 1], 0, 100) == [5, 1]


def test_likelier_leaves_come_first_and_share_their_requests_room():
    runs = [ForcedRun(0, 2, 4), ForcedRun(0, 1, 4), ForcedRun(1, 3, 2)]
    assert policy().lengths(runs, [6, 9], 5, 100) == [2, 4, 2]


def test_leaves_that_are_never_reached_get_none_and_learn_to_again():
    own = policy()
    for _ in range(200):
        own.observe_leaf(2, False)
    assert own.lengths([ForcedRun(0, 2, 4), ForcedRun(0, 1, 4)], [20], 3, 100) == [0, 4]
    for _ in range(50):
        own.observe_leaf(2, True)
    assert own.lengths([ForcedRun(0, 2, 4)], [20], 3, 100) == [4]


def test_where_a_row_costs_as_much_as_a_cycle_only_sure_tokens_pay():
    dear = policy({1: 10e-3, 2: 19e-3, 1024: 9.3})
    assert dear.lengths([ForcedRun(0, 0, 5), ForcedRun(0, 1, 5)], [30], 0, 100) == [5, 0]


def test_a_second_must_bring_what_recent_cycles_did():
    own = policy()
    for _ in range(60):  # ten tokens a cycle
        own.observe(1, 100, 12, 10, 22e-3, 0.0)
    assert own.lengths([ForcedRun(0, 1, 5)], [30], 12, 100) == [5]
    for _ in range(60):
        own.observe_leaf(1, False)
    assert own.lengths([ForcedRun(0, 1, 5)], [30], 12, 100) == [0]
    assert own.lengths([ForcedRun(0, 0, 5)], [30], 12, 100) == [5]


def test_counts_of_experts_teach_what_rows_of_a_mixture_read():
    reads = ExpertReads(experts=128, per_token=8, share=0.6)
    own = ForcedPolicy(CycleCosts(experts=reads))
    own.observe(1, 100, 7, 8, 5e-3, 0.0)
    assert reads.exponent == EXPONENT and not reads.passes
    own.observe(1, 100, 7, 8, 5e-3, 0.0, experts=64.0)  # eight rows share none
    assert reads.exponent > EXPONENT and reads.passes[8].experts == 64.0
