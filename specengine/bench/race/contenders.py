"""Contenders of a race: drafters under rules, synthetic drafters, sequential cascades, and the control."""

from __future__ import annotations

import re
from typing import NamedTuple

from specengine.bench.race.sequential import SeqCascade, is_sequential, open_sequential
from specengine.bench.race.synthetic import SyntheticEngine, is_synthetic
from specengine.engine.engine import Engine
from specengine.models.lora.adapters import Adapters
from specengine.tensor_parallel.loading import LoadedModel

BASE = "none"  # the drafter of plain decoding, which every speedup is measured against
CONTROL = "control"  # plain decoding in a second engine: its speedup shows the noise around 1

ContenderEngine = Engine | SeqCascade


class Contender(NamedTuple):
    """A drafter under a rule, both as the benchmark's options describe them."""

    drafter: str
    rule: str = "match"


PLAIN = Contender(BASE)


def split_drafters(text: str) -> list[str]:
    """Splits a list such as `none,prompt_lookup,nodes=16` into drafters, and puts `none` first if it is missing.

    `option=value` belongs to the drafter before it. A number belongs to a `synthetic` drafter before it.
    Raises ValueError for an empty item or an option without a drafter.
    """
    drafters: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        if not item:
            raise ValueError(f"drafters: expected names separated by commas, got {text!r}")
        is_rate = re.fullmatch(r"[\d.]+", item) and drafters and is_synthetic(drafters[-1])
        if not is_rate and not re.match(r"[\w-]+\s*=", item):
            drafters.append(item)
        elif drafters:
            drafters[-1] += f",{item}"
        else:
            raise ValueError(f"drafters: option {item!r} has no drafter before it in {text!r}")
    return drafters if BASE in drafters else [BASE, *drafters]


def open_contender(
    model: LoadedModel,
    drafter: str,
    *,
    rule: str = "match",
    max_batch_size: int = 16,
    adapters: Adapters | None = None,
) -> ContenderEngine:
    """Opens the engine that a drafter's and a rule's description name.

    It has no prefix cache, because a repeated question would skip its prefill.
    """
    if is_sequential(rule):
        return open_sequential(model, drafter, rule, max_batch_size)
    kind = SyntheticEngine if is_synthetic(drafter) else Engine
    drafter = BASE if drafter == CONTROL else drafter
    return kind(model, drafter=drafter, rule=rule, max_batch_size=max_batch_size, prefix_cache_mib=0, adapters=adapters)
