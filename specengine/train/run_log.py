"""training.jsonl: a line per step and per evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from specengine.train.objectives.level_report import LevelReport


def loss_entry(report: LevelReport) -> dict[str, Any]:
    """Averages per level: the loss, and the share of best guesses that are the target's token."""
    rows = report.rows.clamp(min=1)
    return {"loss": _rounded(report.loss / rows), "agreement": _rounded(report.agreed / rows)}


def held_out_entry(report: LevelReport) -> dict[str, Any]:
    """Extends loss_entry() by the acceptance that a cycle would have."""
    return loss_entry(report) | {
        "acceptance": _rounded(report.acceptance),
        "near_acceptance": _rounded(report.near_acceptance),
        "tau": round(report.tau, 4),
        "near_tau": round(report.near_tau, 4),
    }


def _rounded(numbers: Any) -> list[float]:
    return [round(float(x), 4) for x in torch.as_tensor(numbers)]


class RunLog:
    """Writes lines {"step": .., "tokens": .., ..}. A resumed run drops the lines of steps that it repeats."""

    def __init__(self, path: Path, step: int) -> None:
        lines = [line for line in read_log(path) if line["step"] <= step] if step else []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        for line in lines:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a log, without a last line that a killed run cut off."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
