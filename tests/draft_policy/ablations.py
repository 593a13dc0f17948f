"""What each part of the policy is worth on the recorded texts: python -m tests.draft_policy.ablations prints the table.

A number is the mean speed-up over plain decoding (geometric, over traces, machines and sources) with a part switched
off or a constant changed, in percent of the policy as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import exp, log
from typing import Any
from unittest.mock import patch

from specengine.draft_policy import cost_model, policy
from specengine.draft_policy.acceptance import Calibration
from specengine.draft_trees.join import join_trees
from specengine.draft_trees.scored_tree import ScoredTree
from tests.draft_policy.replay import DRAFTS, Machine, Plan, Remembered, Text, adaptive, fixed, load

STEEP = {1: 18.6e-3, 2: 19.5e-3, 4: 21.2e-3, 8: 27.3e-3, 16: 50e-3, 32: 100e-3, 256: 800e-3}  # llama-3.2-1b, int4
MACHINES = {
    "usual": Machine(),
    "slower in the middle": Machine(slowness=lambda seconds: 2.0 if seconds > 0.4 else 1.0),
    "dear rows": Machine(rows=STEEP, drafts={"suffix": (0.2e-3, 0.0), "eagle3": (3e-3, 2.3e-3)}),
    "dear network": Machine(drafts={**DRAFTS, "eagle3": (3e-3, 1e-3)}),
}
SOURCES = (["suffix"], ["eagle3"], ["suffix", "eagle3"])


def speed(all_names: Sequence[list[str]] = SOURCES, confidence: float = 1.0) -> float:
    """Returns the mean speed-up of the policy over plain decoding. confidence: below 1, eagle3 is surer than it was."""
    texts, logs = [_surer(text, confidence) for text in load()], []
    for machine in MACHINES.values():
        for names in all_names:
            memory = Remembered()
            adaptive(texts, names, machine, memory=memory)
            for trace, batch in ((texts, 1), ([text.cut(12) for text in texts], 1), (texts, 3)):
                plain = fixed(trace, Plan(), machine, batch)
                logs.append(log(plain / adaptive(trace, names, machine, batch, memory)))
                logs.append(log(plain / adaptive(trace, names, machine, batch)))
    return exp(sum(logs) / len(logs))


def _surer(text: Text, confidence: float) -> Text:
    drafts = [
        {**row, "eagle3": replace(row["eagle3"], chances=[chance**confidence for chance in row["eagle3"].chances])}
        for row in text.drafts
    ]
    return Text(text.tokens, drafts, text.kind)


@contextmanager
def _both(*patches: Any) -> Iterator[None]:
    first, *others = patches
    with first:
        if others:
            with _both(*others):
                yield
        else:
            yield


def constant(name: str, value: Any, module: Any = policy) -> Any:
    """Changes a constant of a module."""
    return patch.object(module, name, value)


def _plain_price(self: Any, count: int, curve: Any) -> float:
    return count / curve(0)


def _joined(one: ScoredTree, other: ScoredTree, pooled: bool) -> ScoredTree:
    return join_trees(one, other)


_NO_CALIBRATION = patch.object(Calibration, "__call__", lambda self, chances: list(chances))
ALONE: list[tuple[str, Any, dict[str, Any]]] = [
    ("no calibration, of a network that is too sure", _NO_CALIBRATION, {"all_names": [["eagle3"]], "confidence": 0.3}),
]
CASES = {
    "no calibration": lambda: _NO_CALIBRATION,
    "price of plain decoding": lambda: patch.object(policy.DraftPolicy, "_price", _plain_price),
    "no speed of the machine": lambda: constant("SPEED", 0.0, cost_model),
    "the higher chance of joined trees": lambda: patch.object(
        policy, "join_trees", lambda one, other, pooled: join_trees(one, other)
    ),
    "no exploration": lambda: constant("EXPLORED", 1e-9),
    **{f"EXPLORED = {x}": lambda x=x: constant("EXPLORED", x) for x in (0.003, 0.03)},
    **{f"FIRST = {x}": lambda x=x: constant("FIRST", x) for x in (1, 2, 8)},
    **{f"MEMORY = {x}": lambda x=x: constant("MEMORY", x) for x in (8, 16, 64)},
    **{f"CYCLES = {x}": lambda x=x: constant("CYCLES", x) for x in (8, 32, 64)},
    **{f"TOGETHER = {x}": lambda x=x: constant("TOGETHER", x) for x in (0.8, 1.0)},
    **{f"SPEED = 1/{x}": lambda x=x: constant("SPEED", 1 / x, cost_model) for x in (4, 16)},
    **{f"USUAL = 1/{x}": lambda x=x: _usual(1 / x) for x in (8, 32)},
}


def _usual(share: float) -> Any:
    def followed(usual: float, seconds: float, quick: float = 0.0) -> float:
        return usual + (quick or share) * (min(seconds, 2 * usual) - usual)

    return _both(patch.object(cost_model, "followed", followed), patch.object(policy, "followed", followed))


def main() -> None:
    whole = speed()
    print(f"| part | speed |\n|---|---|\n| the policy | {whole:.3f}x of plain |")
    for name, switched in CASES.items():
        with switched():
            print(f"| {name} | {100 * (speed() / whole - 1):+.1f} % |", flush=True)
    for name, switched, arguments in ALONE:
        with_it = speed(**arguments)
        with switched:
            print(f"| {name} | {100 * (speed(**arguments) / with_it - 1):+.1f} % |", flush=True)


if __name__ == "__main__":
    main()
