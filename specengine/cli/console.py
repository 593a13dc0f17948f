"""Output of the commands: streamed text, a summary line, cycle traces, log-probabilities."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from specengine.types import CycleTrace, GenerationOutput, TokenLogprob

ACCEPTED, REJECTED = "green", "dim"


def write(text: str) -> None:
    """Writes text to stdout unchanged and flushes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def summarise(outputs: Sequence[GenerationOutput], seconds: float, drafter: str) -> str:
    """Returns one line about outputs that were generated together in `seconds`: speed, tau, drafter and rule."""
    tokens = sum(len(output.token_ids) for output in outputs)
    cycles = sum(output.stats.cycles for output in outputs)
    reasons = ", ".join(dict.fromkeys(output.finish_reason for output in outputs))
    return (
        f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s, tau {tokens / cycles:.2f}, "
        f"{cycles} cycles, drafter {drafter}{_source_shares(outputs)}, {_rule_note(outputs)}finished by {reasons}"
    )


def _source_shares(outputs: Sequence[GenerationOutput]) -> str:
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for name, source in (item for output in outputs for item in output.stats.sources.items()):
        drafted[name] += source.drafted
        accepted[name] += source.accepted
    shares = ", ".join(f"{name} {accepted[name]}/{count}" for name, count in drafted.items())
    return f" (accepted: {shares})" if shares else ""


def _rule_note(outputs: Sequence[GenerationOutput]) -> str:
    """Names the rule, unless it is the default."""
    stats = outputs[0].stats
    if not stats.lossless:
        relaxed = sum(output.stats.relaxed for output in outputs)
        return f"rule {stats.rule} (lossy, {relaxed} relaxed), "
    return f"rule {stats.rule}, " if stats.rule != "match" else ""


def show_trace(trace: Sequence[CycleTrace], token_text: Callable[[int], str]) -> None:
    """Prints every cycle's tree on stderr.

    `+` marks accepted nodes and `-` the others. A run of single children shares one line.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for number, cycle in enumerate(trace, start=1):
        bonus = "none" if cycle.bonus is None else repr(token_text(cycle.bonus))
        label = f"cycle {number}: drafted {len(cycle.tokens) - 1}, accepted {len(cycle.accepted)}, bonus {bonus}"
        tree = Tree(Text(label), guide_style=REJECTED)
        _add_branches(tree, 0, cycle, _children(cycle), token_text)
        console.print(tree)


def show_logprobs(logprobs: Sequence[TokenLogprob], token_text: Callable[[int], str]) -> None:
    """Prints one line per token on stderr: its log-probability, then the most likely tokens with theirs."""
    for entry in logprobs:
        top = "  ".join(f"{token_text(token)!r} {value:.3f}" for token, value in entry.top)
        typer.echo(f"{entry.logprob:9.3f}  {token_text(entry.token_id)!r}  | {top}", err=True)


def _children(cycle: CycleTrace) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in cycle.tokens]
    for node, parent in enumerate(cycle.parents[1:], start=1):
        children[parent].append(node)
    return children


def _add_branches(
    branch: Tree, node: int, cycle: CycleTrace, children: list[list[int]], token_text: Callable[[int], str]
) -> None:
    accepted = set(cycle.accepted)
    for child in children[node]:
        run = [child]
        while len(children[run[-1]]) == 1 and (children[run[-1]][0] in accepted) == (child in accepted):
            run.append(children[run[-1]][0])
        mark, style = ("+", ACCEPTED) if child in accepted else ("-", REJECTED)
        label = Text(f"{mark} {' '.join(repr(token_text(cycle.tokens[n])) for n in run)}", style)
        _add_branches(branch.add(label), run[-1], cycle, children, token_text)
