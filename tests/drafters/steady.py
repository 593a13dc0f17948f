"""A clock for drafters with given costs of cycles."""

from __future__ import annotations

from specengine.draft_policy.policy import DraftPolicy


def policy_in(drafter) -> DraftPolicy:
    return drafter.policy


def pass_time(drafter, seconds):
    """Lets time pass for a drafter that steady() has a clock for."""
    policy_in(drafter)._clock.now += seconds


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def steady(drafter):
    """Makes cycles take what the drafter's costs say, and drafting no time; returns the drafter."""
    policy = policy_in(drafter)
    observe = policy.observe

    def observe_after_a_cycle(draft, committed):
        if draft.began is not None:
            pass_time(drafter, draft.seconds(draft.nodes))
        observe(draft, committed)

    policy._clock, policy.observe = Clock(), observe_after_a_cycle
    return drafter
