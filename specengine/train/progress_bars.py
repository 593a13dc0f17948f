"""Shows a training run: a bar with loss per level and held-out acceptance, or lines without a terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from specengine.train.trainer import Progress

_LINE_SECONDS = 30.0  # between two lines without a terminal


class ProgressBars:
    """The bars of one run. visible: false in all processes but the first."""

    def __init__(self, visible: bool) -> None:
        self._console = Console(stderr=True)
        self._visible = visible
        self._shown = 0.0
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[about]}"),
            console=self._console,
            disable=not (visible and self._console.is_terminal),
        )

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, what: str, total: int) -> None:
        """Replaces the bar with a new one."""
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._bars.add_task(what, total=total, about="")

    def advance(self, count: int) -> None:
        """Advances the bar by `count`."""
        task = self._bars.tasks[-1]
        self._bars.advance(task.id, count)
        self._line(f"{task.description}: {int(task.completed)} tokens")

    def show(self, progress: Progress) -> None:
        """Shows a step or an evaluation."""
        about = _text(progress)
        self._bars.update(self._bars.tasks[-1].id, completed=progress.step, about=about)
        self._line(
            f"step {progress.step}/{progress.steps}, {progress.tokens} tokens: {about}", "held_out" in progress.line
        )

    def _line(self, text: str, now: bool = False) -> None:
        if not self._visible or self._console.is_terminal:
            return
        if now or time.monotonic() - self._shown >= _LINE_SECONDS:
            self._shown = time.monotonic()
            self._console.print(text, soft_wrap=True, highlight=False)


def _text(progress: Progress) -> str:
    losses: list[Any] = progress.line.get("loss", [])
    parts = [f"loss {' '.join(f'{x:.2f}' for x in losses)}"] if losses else []
    if (report := progress.held_out) is not None:
        taken = " ".join(f"{x:.2f}" for x in report.acceptance)
        parts.append(f"held out {taken}, tau {report.tau:.2f} (best {report.NEAR}: {report.near_tau:.2f})")
    return ", ".join(parts)
