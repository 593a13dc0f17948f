"""From verification to compaction by every rule, as modelled: walks with notes on rows, and walks in one block."""

from __future__ import annotations

from typing import Any

from specengine.bench.gpu_model.constants import Gpu
from specengine.bench.gpu_model.counts import FROM_LEAVES, RULE_NODES, RULES, VOCABULARY
from specengine.bench.gpu_model.passes import op

BATCH = 1


def verification_by_rule(gpu: Gpu) -> list[dict[str, Any]]:
    """Returns modelled microseconds of each rule at trees of 60 nodes and temperature 1, and those of the compaction.

    Where five children are accepted, and where the root refuses both children; None: not counted.
    """
    return [_rule(gpu, place, rule) for place, rule in enumerate(RULES)]


def _rule(gpu: Gpu, place: int, rule: str) -> dict[str, Any]:
    def us(path: int, noted: int) -> float | None:
        if path == 1 and place == FROM_LEAVES:
            return None
        sizes = {"nodes": RULE_NODES, "batch": BATCH, "vocabulary": VOCABULARY}
        return round(sum(each.us for each in op(gpu, "verify_rule", **sizes, noted=noted, rule=place, path=path)), 1)

    launches = op(gpu, "verify_rule", nodes=RULE_NODES, batch=BATCH, vocabulary=VOCABULARY, noted=1, rule=place, path=0)
    return {
        "rule": rule,
        "launches": len(launches),
        "accepted_us": us(0, 1),
        "accepted_in_one_block_us": us(0, 0),
        "refused_us": us(1, 1),
        "refused_in_one_block_us": us(1, 0),
        "compact_kv_us": round(sum(each.us for each in op(gpu, "compact_kv", nodes=RULE_NODES, batch=BATCH)), 1),
    }
