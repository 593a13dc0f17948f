"""`--preset`: the configurations behind published tables, and what was published beside what is measured.

A preset names its contenders twice: with drafters that come with the package, and for a target of random weights with
drafts whose acceptance is chosen. The published figures are in published.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specengine.bench.race.contenders import CONTROL
from specengine.bench.race.rule_sweep import exact_pair
from specengine.bench.race.run import BASE

PUBLISHED = Path(__file__).with_name("data") / "published.json"
RANDOM = "random:"


@dataclass(frozen=True)
class Entry:
    """A contender. method: what the paper calls it, empty where it is ours alone.
    never_slower: its tree follows what pays, so it should not fall below plain decoding."""

    drafter: str
    method: str = ""
    rule: str = "match"
    never_slower: bool = False


@dataclass(frozen=True)
class Preset:
    """about: what is compared.  shipped, random: the contenders beside plain decoding, for a model whose drafters come
    with the package and for random weights.  quality: also what the rules do to the text."""

    about: str
    shipped: tuple[Entry, ...]
    random: tuple[Entry, ...]
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    quality: bool = False

    def entries(self, model: str) -> tuple[Entry, ...]:
        """The contenders for a model."""
        return self.random if model.startswith(RANDOM) else self.shipped

    def contenders(self, model: str) -> list[tuple[str, str]]:
        """(drafter, rule) of all: plain decoding, the entries, where texts are judged what they are judged by, and the
        control where something should not be slower than plain decoding."""
        pairs = [(BASE, "match")]
        if any(entry.never_slower for entry in self.entries(model)):
            pairs.append((CONTROL, "match"))
        for entry in self.entries(model):
            pair = (entry.drafter, entry.rule)
            pairs += [exact_pair(*pair), pair] if self.quality else [pair]
        return list(dict.fromkeys(pairs))


_RATES = "0.81,0.80,0.79,0.78,0.77,0.76"  # FastEagle's paper: from 0.81 to 0.74 by depth
_EAGLE3_TREE, _FASTEAGLE_TREE = (f"synthetic:{_RATES},k=10,cost={cost}" for cost in ("eagle3", "fasteagle"))
_EAGLE3_TWO, _FASTEAGLE_TWO = (f"synthetic:0.81,0.80,k=1,cost={cost}" for cost in ("eagle3", "fasteagle"))
_SMALL = "draft-model:self,layers=1,length=4,adaptive=false"
_MARS_TREE = "eagle3,nodes=50,levels=7,adaptive=false"
_THETAS = ("0.84", "0.86", "0.88", "0.9", "0.92", "0.94", "0.96", "0.98")
_STATED = {("strict", "0.84"): "theta 0.84"}
_CASCADES = (
    *(("Lossy", f"lossy:alpha={alpha}") for alpha in ("0.1", "0.3", "0.5")),
    *(("BiLD", f"bild:alpha={alpha}") for alpha in ("0.5", "1", "2")),
    *(("Chow", f"cascade:chow,alpha={alpha}") for alpha in ("0.1", "0.2", "0.4")),
    *(("Diff", f"cascade:diff,alpha={alpha}") for alpha in ("-0.25", "0", "0.25")),
    *(("OPT", f"cascade:opt,alpha={alpha}") for alpha in ("-0.25", "0", "0.25")),
    *(("Token", f"cascade:token-v3,alpha={alpha}") for alpha in ("0.25", "0.5", "0.75")),
)

PRESETS = {
    "fasteagle-table1": Preset(
        "drafters at batch 1, greedy and sampled",
        (
            Entry("prompt_lookup"),
            Entry("draft-model,adaptive=false"),
            Entry("medusa,adaptive=false"),
            Entry("eagle3,adaptive=false", "EAGLE-3"),
            Entry("eagle3", never_slower=True),
            Entry("fasteagle,top_k=10,adaptive=false", "FastEagle"),
            Entry("fasteagle", never_slower=True),
            Entry("auto", never_slower=True),
        ),
        (Entry(_EAGLE3_TREE, "EAGLE-3"), Entry(_FASTEAGLE_TREE, "FastEagle")),
        temperatures=(0.0, 1.0),
    ),
    "fasteagle-table2": Preset(
        "what FastEagle's parts are worth",
        (
            Entry("fasteagle,top_k=10,adaptive=false", "FastEagle"),
            Entry("fasteagle,top_k=1,adaptive=false", "chain"),
            Entry("medusa,adaptive=false"),
        ),
        (Entry(_FASTEAGLE_TREE, "FastEagle"), Entry(_FASTEAGLE_TREE.replace("k=10", "k=1"), "chain")),
    ),
    "fasteagle-table3": Preset(
        "batches: the published chain of two, and trees that follow what pays",
        (
            Entry("fasteagle,top_k=1,levels=2,adaptive=false", "FastEagle"),
            Entry("eagle3,nodes=3,levels=2,top_k=1,adaptive=false"),
            Entry("fasteagle", never_slower=True),
            Entry("eagle3", never_slower=True),
            Entry("auto", never_slower=True),
        ),
        (Entry(_FASTEAGLE_TWO, "FastEagle"), Entry(_EAGLE3_TWO), Entry("prompt_lookup", never_slower=True)),
        batches=(1, 2, 4, 8, 16, 24, 32, 40, 48, 56),
    ),
    "ouroboros-table2": Preset(
        "phrases and sentences of a smaller model, greedy",
        (
            Entry("draft-model,adaptive=false", "speculative decoding"),
            Entry("lookahead,adaptive=false", "lookahead decoding"),
            Entry("ouroboros,adaptive=false", "Ouroboros"),
            Entry("ouroboros", never_slower=True),
        ),
        (
            Entry(_SMALL, "speculative decoding"),
            Entry("lookahead,adaptive=false", "lookahead decoding"),
            Entry("ouroboros:self,layers=1,adaptive=false", "Ouroboros"),
        ),
    ),
    "mars-table1": Preset(
        "EAGLE-3 with and without MARS's margin, sampled; away from the margin the second one draws as EAGLE-3 does",
        (
            Entry(_MARS_TREE, "EAGLE-3"),
            Entry(_MARS_TREE, "MARS", "margin:strict,theta=0.9"),
            Entry(_MARS_TREE, rule="margin:lossless-base,theta=0.9"),
        ),
        (Entry(_EAGLE3_TREE, "EAGLE-3"), Entry(_EAGLE3_TREE, "MARS", "margin:strict,theta=0.9")),
        temperatures=(1.0,),
        quality=True,
    ),
    "mars-theta": Preset(
        "MARS's margin from lenient to strict",
        tuple(
            Entry(_MARS_TREE, _STATED.get((mode, theta), ""), f"margin:{mode},theta={theta}")
            for mode in ("strict", "lossless-base")
            for theta in _THETAS
        ),
        tuple(
            Entry(_EAGLE3_TREE, _STATED.get(("strict", theta), ""), f"margin:strict,theta={theta}") for theta in _THETAS
        ),
        quality=True,
    ),
    "cascades-slides": Preset(
        "speculative cascades by how much they leave to the small model",
        tuple(Entry("draft-model,adaptive=false", method, rule) for method, rule in _CASCADES),
        tuple(Entry(_SMALL, method, rule) for method, rule in _CASCADES),
        temperatures=(0.0, 1.0),
        quality=True,
    ),
    "glide-cost": Preset(
        "a drafter that reads the target's cache: what it costs, and what siblings add",
        (
            Entry("glide,cape=false,adaptive=false", "GLIDE"),
            Entry("glide,adaptive=false", "GLIDE and CAPE"),
            Entry("glide,cross=false,cape=false,adaptive=false"),
            Entry("glide", never_slower=True),
        ),
        (Entry("synthetic:0.6,0.6,0.6,0.6", "GLIDE"), Entry("synthetic:0.7,0.7,0.7,0.7,k=7", "GLIDE and CAPE")),
    ),
}


@cache
def published(preset: str) -> list[dict[str, Any]]:
    """The rows of a preset in published.json, as dictionaries by its columns."""
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    return [row for row in rows if row["preset"] == preset]


def named(preset: str) -> Preset:
    """Raises ValueError for a name that no preset has."""
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    return PRESETS[preset]


def efficiency(speedup: Any, tau: Any) -> float | None:
    """Speedup over tau, where both are single numbers."""
    return speedup / tau if isinstance(speedup, int | float) and tau else None


def side_by_side(preset: str, model: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was published and what `run_dicts` says, per method; the least speedup of those that should have one; and
    the least and the largest of the control.

    rows: of the result, each with `published` and `measured` (None where there is no such thing); every published row
    and every contender stands once, so that one beside a published row is the first of the same setting.
    """
    methods = {(entry.drafter, entry.rule): entry.method for entry in PRESETS[preset].entries(model)}
    adaptive = {entry.drafter for entry in PRESETS[preset].entries(model) if entry.never_slower}
    waiting = [_measured(row) for row in rows if row["peer"] is None and row["drafter"] not in (BASE, CONTROL)]
    lines = []
    for row in published(preset):
        same = (each for each in waiting if _fits(row, each, methods))
        found = next(same, None)
        waiting = [each for each in waiting if each is not found]
        lines.append({"method": row["method"], "published": _figures(row), "measured": found})
    lines += [
        {"method": methods.get((each["drafter"], each["rule"]), ""), "published": None, "measured": each}
        for each in waiting
    ]
    least = min((each for each in map(_measured, rows) if each["drafter"] in adaptive), key=_speed, default=None)
    control = sorted(row["speedup"] for row in rows if row["drafter"] == CONTROL)
    about = {"name": preset, "about": PRESETS[preset].about, "rows": lines, "least": least}
    return about | {"control": [control[0], control[-1]] if control else None}


def _fits(row: dict[str, Any], measured: dict[str, Any], methods: dict[tuple[str, str], str]) -> bool:
    settings = all(row[key] in (None, measured[key]) for key in ("temperature", "batch"))
    return settings and methods.get((measured["drafter"], measured["rule"])) == row["method"]


def _measured(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("label", "drafter", "rule", "temperature", "batch", "speedup", "tau", "agreement", "log_likelihood")
    return {key: row.get(key) for key in keys} | {"efficiency": efficiency(row["speedup"], row["tau"])}


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in ("preset", "method")}
    return kept | {"efficiency": efficiency(row["speedup"], row["tau"])}


def _speed(measured: dict[str, Any]) -> float:
    return measured["speedup"]
