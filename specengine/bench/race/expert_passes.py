"""How many experts the passes over a mixture of experts read, by their rows, and what a draft policy predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from specengine.bench.peers.base import Peer
from specengine.bench.race.contenders import ContenderEngine
from specengine.draft_policy.policy import DraftPolicy
from specengine.engine.engine import Engine

CAPTION = (
    "Cycles that a drafter's policy measured, at all batch sizes, by the rows of their pass. experts: distinct ones "
    "that a layer read, mean of layers and passes. predicted: ms of a cycle without its drafting, as the policy "
    "expected it before. measured: the same, mean; other work on the machine raises it."
)


def expert_passes(engine: ContenderEngine | Peer) -> list[dict[str, Any]]:
    """Returns what an engine's policy recorded, by rows; empty without a policy, and for a dense model."""
    policy: DraftPolicy | None = getattr(engine.drafter, "policy", None) if isinstance(engine, Engine) else None
    if policy is None or policy.costs.experts is None:
        return []
    return [
        {
            "rows": rows,
            "passes": sums.passes,
            "experts_per_layer": sums.experts / sums.passes,
            "predicted_ms": 1e3 * sums.predicted / sums.passes,
            "measured_ms": 1e3 * sums.measured / sums.passes,
        }
        for rows, sums in sorted(policy.costs.experts.passes.items())
    ]


def experts_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the passes of the rows of `run_dicts` as a table; an engine's are the same at every batch size."""
    out = Table(title="experts by rows", title_justify="left", caption=CAPTION, caption_justify="left", min_width=90)
    out.add_column("drafter", overflow="fold", min_width=13)
    for name in ("rows", "passes", "experts per layer", "predicted ms", "measured ms"):
        out.add_column(name, justify="right", no_wrap=True)
    engines = {(row["drafter"], row["rule"]): row for row in rows}
    for row in engines.values():
        for each in row["expert_passes"]:
            out.add_row(
                row["label"],
                str(each["rows"]),
                str(each["passes"]),
                f"{each['experts_per_layer']:.1f}",
                f"{each['predicted_ms']:.2f}",
                f"{each['measured_ms']:.2f}",
            )
    return out
