"""Draws docs/speed.svg, the README's picture of speed, from a recorded run: python bench/speed_picture.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "smollm2-135m-drafters.json"
PICTURE = ROOT / "docs" / "speed.svg"
LABELS = {
    "none": "plain decoding",
    "prompt_lookup": "prompt_lookup",
    "suffix": "suffix (corpus)",
    "auto": "auto (suffix + EAGLE-3)",
}
WIDTH, ROW, TOP, LEFT, RIGHT = 760, 34, 62, 200, 240  # pixels


def picture(data: dict[str, Any]) -> str:
    """Returns the SVG of a result of python -m specengine.bench: one bar per drafter of LABELS, at temperature 0."""
    rows = {row.get("label", row["drafter"]): row for row in data["runs"] if row["peer"] is None}
    chosen = [rows[name] for name in LABELS]
    longest = max(row["tokens_per_second"] for row in chosen)
    height = TOP + ROW * len(chosen) + 10
    machine = data["machine"]
    where = f"{machine['cores']} cores ({machine['instruction_set']}, {machine['cpu']}), {data['questions']} questions"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="16" font-weight="600" fill="#1f2328">Tokens per second, '
        f"{Path(data['model']).name}, greedy</text>",
        f'<text x="16" y="46" font-size="12" fill="#59636e">{where}</text>',
    ]
    for number, row in enumerate(chosen):
        lines += _bar(row, TOP + ROW * number, longest)
    return "\n".join([*lines, "</svg>", ""])


def _bar(row: dict[str, Any], top: int, longest: float) -> list[str]:
    width = (WIDTH - LEFT - RIGHT) * row["tokens_per_second"] / longest
    colour = "#8b949e" if row["drafter"] == "none" else "#0969da"
    figures = f"{row['tokens_per_second']:.1f}/s, {row['speedup']:.2f}x, tau {row['tau']:.2f}"
    label = LABELS[row.get("label", row["drafter"])]
    return [
        f'<text x="{LEFT - 10}" y="{top + 19}" text-anchor="end" fill="#1f2328">{label}</text>',
        f'<rect x="{LEFT}" y="{top + 4}" width="{width:.1f}" height="22" rx="3" fill="{colour}"/>',
        f'<text x="{LEFT + width + 8:.1f}" y="{top + 19}" fill="#1f2328">{figures}</text>',
    ]


def main() -> None:
    PICTURE.write_text(picture(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
