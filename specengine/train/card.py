"""The README of a trained drafter: where it comes from and what held-out text shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specengine.train.data.corpus import Corpus
from specengine.train.objectives.base import LevelReport

if TYPE_CHECKING:
    from specengine.train.command import TrainRequest


def model_card(request: TrainRequest, corpus: Corpus, report: LevelReport, tokens: int, command: str) -> str:
    """Markdown. tokens: learned up to here, repetitions included.  command: what makes it again."""
    data = "questions of a file, answered by the target" if request.prompts else "questions and answers by the target"
    columns = zip(report.acceptance, report.near_acceptance, (report.agreed / report.rows).tolist(), strict=True)
    rows = [f"| {i} | {best:.3f} | {near:.3f} | {all_:.3f} |" for i, (best, near, all_) in enumerate(columns, start=1)]
    return "\n".join(
        [
            f"# {request.drafter} for {request.target}",
            "",
            f"- Data: {data}: {len(corpus.training)} dialogues with {corpus.wanted_tokens(corpus.training)} tokens to"
            f" learn; {len(corpus.held_out)} others held out.",
            f"- Trained on {tokens} tokens (repetitions included), seed {request.config.seed}.",
            f"- Command: `{command}`",
            *_earlier(request),
            "",
            "Held-out acceptance, greedy: of the best guess and of the best "
            f"{report.NEAR}, given that the best guesses of all levels above were taken; and of all rows.",
            "",
            f"| level | best | best {report.NEAR} | all rows |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            f"Expected tokens per cycle: {report.tau:.2f} as a chain, {report.near_tau:.2f} with {report.NEAR} guesses "
            "per level.",
            "",
        ]
    )


def _earlier(request: TrainRequest) -> list[str]:
    """What the card of the run says from whose drafter this one went on."""
    card = request.start / "README.md" if request.start else None
    if card is None or not card.exists():
        return []
    told = [line for line in card.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("- ")]
    return ["- Went on from an earlier drafter:", *(f"  {line}" for line in told)]
