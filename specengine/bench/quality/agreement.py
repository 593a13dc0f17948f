"""Quality of the text under a rule: agreement with the exact text, and log-likelihood by the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from rich.table import Table

from specengine.bench.quality.perplexity import token_logprobs
from specengine.bench.race.contenders import PLAIN
from specengine.bench.race.rule_sweep import exact_contender, family
from specengine.bench.race.run import Run
from specengine.bench.race.sequential import is_sequential
from specengine.models.transformer import Transformer

CAPTION = (
    "tokens/s, speedup: of the repetition of median time, over plain decoding. tau: tokens per pass of the target. "
    "relaxed: share of the tokens that the exact rule would have rejected. agreement: share of the tokens before the "
    "first difference from the exact output, which is that of `match` or `rejection` with the same drafter, and plain "
    "decoding for a sequential cascade. A lossless rule with other random draws gives another text of the same "
    "distribution. log-likelihood: mean over all tokens, by the target without temperature, in nats."
)


def agreement(answers: Sequence[Sequence[int]], exact: Sequence[Sequence[int]]) -> float:
    """Returns the share of the exact answers' tokens before the first difference, 0 to 1."""
    same = 0
    for ours, theirs in zip(answers, exact, strict=True):
        pairs = zip(ours, theirs, strict=False)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return same / sum(map(len, exact))


def quality_rows(target: Transformer, runs: Sequence[Run], advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Returns family, relaxed, agreement and log_likelihood of each run, by the answers of its first repetition.

    relaxed is None for a sequential cascade.
    """
    by_contender = {(run.temperature, run.batch, run.drafter, run.rule): run for run in runs if run.peer is None}

    @cache  # many rules give the same answer
    def nats(prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
        return token_logprobs(target, prompt + answer, len(prompt)).sum().item()

    rows = []
    for run in runs:
        reference = PLAIN if run.peer else exact_contender(run.drafter, run.rule)
        exact = by_contender[(run.temperature, run.batch, *reference)].answers
        answers = run.answers.values()
        tokens = sum(len(answer.token_ids) for answer in answers)
        likelihood = sum(nats(tuple(answer.prompt_token_ids), tuple(answer.token_ids)) for answer in answers) / tokens
        relaxed = sum(answer.stats.relaxed for answer in answers) / tokens
        same = agreement([run.answers[key].token_ids for key in exact], [each.token_ids for each in exact.values()])
        rows.append(
            {
                "family": family(run.rule),
                "relaxed": None if is_sequential(run.rule) else relaxed,
                "agreement": same,
                "log_likelihood": likelihood,
            }
        )
        advance()
    return rows


def rules_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Returns the merged rows of `run_dicts` and `quality_rows` as a table."""
    out = Table(title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    out.add_column("rule", overflow="fold", min_width=20)
    out.add_column("drafter", overflow="fold")
    for name in ("batch", "tokens/s", "speedup", "tau", "relaxed", "agreement", "log-likelihood"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(
            row["rule"],
            row["label"],
            str(row["batch"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['tau']:.2f}" if row["tau"] else "",
            "" if row["relaxed"] is None else f"{row['relaxed']:.1%}",
            f"{row['agreement']:.1%}",
            f"{row['log_likelihood']:.3f}",
        )
    return out
