"""What races: an engine with a drafter and a rule, one on synthetic drafts, a sequential cascade, or the control."""

from __future__ import annotations

from specengine.bench.race.sequential import SeqCascade, is_sequential, open_sequential
from specengine.bench.race.synthetic import SyntheticEngine, is_synthetic
from specengine.engine.engine import Engine
from specengine.tensor_parallel.loading import LoadedModel

Contender = Engine | SeqCascade

CONTROL = "control"  # plain decoding a second time: how far from 1 two equals come out


def open_contender(model: LoadedModel, drafter: str, *, rule: str = "match", max_batch_size: int = 16) -> Contender:
    """What a drafter's and a rule's description in the lists of the benchmark ask for.

    Prompts are read anew whenever they are asked again: first tokens would come of remembering else.
    """
    if is_sequential(rule):
        return open_sequential(model, drafter, rule, max_batch_size)
    kind = SyntheticEngine if is_synthetic(drafter) else Engine
    drafter = "none" if drafter == CONTROL else drafter
    return kind(model, drafter=drafter, rule=rule, max_batch_size=max_batch_size, prefix_cache_mib=0)
