"""The README of a trained drafter: its origin and its acceptance on held-out text."""

from __future__ import annotations

from specengine.train.data.corpus import Corpus
from specengine.train.job import TrainJob
from specengine.train.objectives.level_report import LevelReport


def model_card(job: TrainJob, corpus: Corpus, report: LevelReport, tokens: int, command: str) -> str:
    """Writes the card in Markdown.

    tokens: learned so far, repetitions included.  command: repeats the training.
    """
    data = "questions of a file, answered by the target" if job.prompts else "questions and answers by the target"
    columns = zip(report.acceptance, report.near_acceptance, (report.agreed / report.rows).tolist(), strict=True)
    rows = [f"| {i} | {best:.3f} | {near:.3f} | {all_:.3f} |" for i, (best, near, all_) in enumerate(columns, start=1)]
    return "\n".join(
        [
            f"# {job.drafter} for {job.target}",
            "",
            f"- Data: {data}: {len(corpus.training)} dialogues with {corpus.wanted_tokens(corpus.training)} tokens to"
            f" learn; {len(corpus.held_out)} others held out.",
            f"- Trained on {tokens} tokens (repetitions included), seed {job.config.seed}.",
            f"- Command: `{command}`",
            *_start(job),
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


def _start(job: TrainJob) -> list[str]:
    """Quotes the card of the drafter that this run started from."""
    card = job.start / "README.md" if job.start else None
    if card is None or not card.exists():
        return []
    quoted = [line for line in card.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("- ")]
    return ["- Went on from an earlier drafter:", *(f"  {line}" for line in quoted)]
