"""Acceptance as running averages."""

from specengine.draft_policy.acceptance import Acceptance


def test_averages_start_at_the_prior_and_follow_what_is_seen():
    rates = Acceptance((0.5, 0.1), weight=4, memory=20)
    assert rates.rates() == [0.5, 0.1]
    for _ in range(4):
        rates.observe(0, True)
    assert 0.7 < rates.rates()[0] < 0.8 and rates.rates()[1] == 0.1
    for _ in range(100):
        rates.observe(0, False)
    assert rates.rates()[0] < 0.1


def test_recent_observations_count_more():
    early, late = (Acceptance((0.5,), weight=1, memory=10) for _ in range(2))
    for step in range(40):
        early.observe(0, step < 20)
        late.observe(0, step >= 20)
    assert early.rates()[0] < 0.2 and late.rates()[0] > 0.8


def test_a_request_teaches_the_engine_and_the_engine_the_next_request():
    engine = Acceptance((0.5, 0.5), weight=4, memory=100)
    request = Acceptance(engine, weight=4, memory=20)
    for _ in range(30):
        request.observe(1, False)
    fresh = Acceptance(engine, weight=4, memory=20)
    assert request.rates()[1] < fresh.rates()[1] < 0.1
    assert fresh.rates()[0] == 0.5
