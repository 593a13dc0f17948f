"""Seconds of a cycle without its drafting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specengine.draft_policy.cost_model import CostModel

CYCLE_SECONDS = 2e-4  # of a cycle beside its pass: host, sampling
DRAFT_SECONDS = 2e-4  # more where anything is drafted: its rows in every stage. Generous, so that doubt drafts nothing


class HasTokens(Protocol):
    """A request, as far as its length goes."""

    tokens: list[int]


def cycle_seconds(costs: CostModel, requests: int, nodes: int, prefix: float) -> float:
    """Returns the seconds of a cycle without its drafting.

    nodes: of all requests, roots excluded.  prefix: tokens in the cache, the mean of the batch.
    """
    return costs(requests + nodes, prefix) + CYCLE_SECONDS + (DRAFT_SECONDS if nodes else 0)


def mean_prefix(requests: Sequence[HasTokens]) -> float:
    """Returns the mean number of tokens of a batch; 0 of an empty one."""
    return sum(len(request.tokens) for request in requests) / max(1, len(requests))
