"""Tables of a run for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from specengine.bench.race.contenders import BASE
from specengine.types import PHASES

DEPTHS = 6  # levels of a tree that tables and pictures show
CAPTION = (
    "tokens/s: output tokens over wall time, prefill included, median repetition by time (range of all). "
    "speedup: tokens/s over that of {base} at the same batch. tau: tokens per cycle, bonus token included. "
    "draft to host: ms per cycle; draft is all work of the drafter. prefill: share of the wall time. "
    "identical: answers with the same tokens as those of {base} in every repetition. "
    "slowest class: the class of questions with the least speedup."
)
ACCEPTANCE_CAPTION = (
    "Share of cycles that accepted a node of this depth, of the cycles that drafted one and accepted a node one level "
    "above. An adaptive tree has a level only where it may pay, which raises the share; adaptive=false avoids that."
)
PEER_CAPTION = (
    "peers: same checkpoint (in the format named), prompt ids, threads and limits, in the same run, one question at a "
    "time. Their arithmetic differs, so their texts may differ; their prefill ends with the first token{sampling}."
)
PRESET_CAPTION = (
    "tau: tokens per cycle, bonus token included. efficiency: speedup over tau, which is the time of a plain pass over "
    "the time of a cycle, so the training of the drafter does not affect it."
)


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Returns the rows of `run_dicts` as a table of speed."""
    caption = CAPTION.format(base=BASE)
    if any(row["peer"] for row in rows):
        sampled = rows[0]["temperature"] > 0
        caption += " " + PEER_CAPTION.format(sampling="; they draw with their own samplers" if sampled else "")
    used = next((row["bandwidth_fraction"] for row in rows if row["drafter"] == BASE and not row["peer"]), None)
    caption += f" After the prompt, {BASE} reads weights and cache at {used:.0%} of the memory's speed." if used else ""
    out = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    widest = max(len(row["peer"] or "") for row in rows)
    out.add_column("drafter", overflow="fold", min_width=max(13, widest))
    for name in ("batch", "tokens/s", "speedup", "tau"):
        out.add_column(name, justify="right", no_wrap=True)
    for name in (*PHASES, "prefill", "identical"):
        out.add_column(name, justify="right", no_wrap=True)
    classes = any(len(row["by_class"]) > 1 for row in rows)
    if classes:
        out.add_column("slowest class")
    for row in rows:
        low, high = row["tokens_per_second_spread"]
        ms = row["ms_per_cycle"]
        out.add_row(
            row["label"],
            str(row["batch"]),
            f"{row['tokens_per_second']:.1f} ({low:.1f}-{high:.1f})",
            f"{row['speedup']:.2f}x",
            f"{row['tau']:.2f}" if row["tau"] else "",
            *(f"{ms[phase]:.2f}" if ms else "" for phase in PHASES),
            f"{row['prefill_seconds'] / row['seconds']:.0%}",
            row["identical"],
            *([_slowest(row["by_class"])] if classes else []),
        )
    return out


def acceptance_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the acceptance by depth of the rows of `run_dicts` that drafted, as a table."""
    out = Table(title="acceptance by depth", title_justify="left", caption=ACCEPTANCE_CAPTION, caption_justify="left")
    out.add_column("drafter", overflow="fold", min_width=13)
    for name in ("batch", *map(str, range(1, DEPTHS + 1))):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if shares := row["level_acceptance"]:
            cells = ("" if share is None else f"{share:.2f}" for share in shares[:DEPTHS])
            out.add_row(row["label"], str(row["batch"]), *cells)
    return out


def _slowest(classes: dict[str, dict[str, Any]]) -> str:
    if len(classes) < 2:
        return ""
    name = min(classes, key=lambda name: classes[name]["speedup"])
    return f"{classes[name]['speedup']:.2f}x {name}"


def peers_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the speed of each drafter over that of each peer: a row per drafter, a column per peer."""
    ours = [row for row in rows if row["speedup_over"]]
    out = Table(title="tokens/s over those of the peers", title_justify="left")
    out.add_column("drafter")
    for mode in ours[0]["speedup_over"]:
        out.add_column(mode, justify="right")
    for row in ours:
        out.add_row(row["label"], *(f"{ratio:.2f}x" for ratio in row["speedup_over"].values()))
    return out


def preset_table(found: dict[str, Any]) -> Table:
    """Returns the result of `side_by_side` as a table."""
    out = Table(
        title=f"{found['name']}: {found['about']}",
        title_justify="left",
        caption=PRESET_CAPTION + _least_speedup(found["least"], found["control"]),
        caption_justify="left",
    )
    for name in ("method", "published: model", "task"):
        out.add_column(name, overflow="fold")
    for name in ("T", "batch", "speedup", "tau", "efficiency"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("measured: drafter", overflow="fold", min_width=13)
    judged = is_judged(found)
    for name in ("T", "batch", "speedup", "tau", "efficiency", *(("agreement", "log-likelihood") if judged else ())):
        out.add_column(name, justify="right", no_wrap=True)
    for row in found["rows"]:
        theirs, ours = row["published"] or {}, row["measured"] or {}
        rule = ours.get("rule", "match")
        contender = ours.get("label", "") + (f" under {rule}" if rule != "match" else "")
        published = (
            theirs.get("model") or "",
            ", ".join(theirs[key] for key in ("task", "quality") if theirs.get(key)),
        )
        quality = quality_figures(ours) if judged else []
        out.add_row(row["method"], *published, *preset_figures(theirs), contender, *preset_figures(ours), *quality)
    return out


def is_judged(found: dict[str, Any]) -> bool:
    """Returns whether the result of `side_by_side` compares texts with those of the exact rule."""
    return any(row["measured"] and row["measured"].get("agreement") is not None for row in found["rows"])


def quality_figures(side: dict[str, Any]) -> list[str]:
    """Returns agreement with the exact rule's text and log-likelihood by the target, empty where not measured."""
    same, nats = side.get("agreement"), side.get("log_likelihood")
    return ["" if same is None else f"{same:.1%}", "" if nats is None else f"{nats:.3f}"]


def preset_figures(side: dict[str, Any]) -> list[str]:
    """Returns temperature, batch, speedup, tau and efficiency of one side, empty where not given."""
    speedup = side.get("speedup")
    speedups = speedup if isinstance(speedup, list) else [speedup]
    return [
        "" if (temperature := side.get("temperature")) is None else f"{temperature:g}",
        "" if (batch := side.get("batch")) is None else str(batch),
        "" if speedup is None else "-".join(f"{each:.2f}" for each in speedups) + "x",
        "" if not (tau := side.get("tau")) else f"{tau:.2f}",
        "" if not (share := side.get("efficiency")) else f"{share:.2f}",
    ]


def _least_speedup(least: dict[str, Any] | None, control: list[float] | None) -> str:
    if least is None:
        return ""
    where = f"{least['label']} at temperature {least['temperature']:g}, batch {least['batch']}"
    text = f" Least speedup of an adaptive tree: {least['speedup']:.2f}x, {where}; it should not be below 1."
    return text + (f" Plain decoding in a second engine: {control[0]:.2f}x to {control[1]:.2f}x." if control else "")
