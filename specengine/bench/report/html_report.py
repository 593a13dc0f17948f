"""`specengine report`: recorded runs side by side in one self-contained HTML file.

Results are untrusted: every text is escaped, pictures are embedded, and the page may not load or run anything.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from specengine.bench.report.labels import counted
from specengine.bench.report.plot import check_matplotlib, picture
from specengine.bench.report.plot_batches import batches_figure
from specengine.bench.report.plot_cycle import cycle_figure
from specengine.bench.report.plot_drafters import drafters_figure
from specengine.bench.report.plot_rows import rows_figure
from specengine.bench.report.plot_rules import rules_figure
from specengine.bench.report.plot_tasks import tasks_figure
from specengine.bench.report.plot_tokens import tokens_figure
from specengine.bench.report.reading import read_results
from specengine.bench.report.tables import preset_figures
from specengine.bench.report.writing import write_whole

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left;white-space:normal}"
    "img{max-width:100%;height:auto}figure{margin:1.5rem 0}figcaption{color:#555}"
    "code{white-space:pre-wrap;overflow-wrap:anywhere;background:#f4f4f4}"
)
PICTURES = {
    "tasks": (tasks_figure, "Speedup over plain decoding by kind of question."),
    "drafters": (drafters_figure, "Acceptance by depth, tau (bonus token included) and speedup, time of a cycle."),
    "cycle": (cycle_figure, "One cycle: its phases in order, and the tokens that it generates."),
    "batches": (batches_figure, "Speedup over plain decoding of the same batch size."),
    "rows": (rows_figure, "Time of a target pass by the rows that it verifies."),
    "rules": (rules_figure, "Quality against speed: the text of each rule compared with the exact text."),
    "tokens": (
        tokens_figure,
        "One answer: a colour per drafter that proposed the token, no colour for tokens of the target.",
    ),
}
# Limits of a picture of bars.
_SETTINGS = 4
_CONTENDERS = 24
_SWEEP = 12  # contenders of a sweep of rules; a larger sweep has no bars


def write_report(files: Sequence[Path], out: Path, pictures: Path | None = None) -> None:
    """Writes a report of results files, and its pictures as PNG files into the folder `pictures`.

    Raises ValueError for a file without results and without matplotlib, FileNotFoundError, OSError.
    """
    check_matplotlib()
    runs = [read_results(file) for file in files]
    names = _names(files)
    drawn = [dict(_pictures(results)) for results in runs]
    if pictures:
        pictures.mkdir(parents=True, exist_ok=True)
        for name, images in zip(names, drawn, strict=True):
            for kind, image in images.items():
                write_whole(pictures / f"{name.replace('/', '-')}-{kind}.png", image)
    body = "".join([*_comparison(names, runs), *(_section(*each) for each in zip(names, runs, drawn, strict=True))])
    page = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width"><title>specengine: recorded runs</title>'
        f"<style>{_STYLE}</style></head><body><h1>Recorded runs</h1>{body}</body></html>\n"
    )
    write_whole(out, page.encode("utf-8", "replace"))


def _names(files: Sequence[Path]) -> list[str]:
    """Returns the names of files; equal names get their folder, and a number if the folders are equal too."""
    names = [file.stem for file in files]
    names = [
        f"{file.parent.name}/{name}" if names.count(name) > 1 else name for file, name in zip(files, names, strict=True)
    ]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _pictures(results: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yields kind and PNG of each picture that the results have data for."""
    few = _few(results["runs"])
    left_out: tuple[str, ...] = ()
    if any(row["family"] for row in few) and len({row["label"] for row in few}) > _SWEEP:
        left_out = ("tasks", "drafters", "cycle")
    for kind, (draw, _) in PICTURES.items():
        shown = results if kind in ("rules", "batches") else {**results, "runs": few}
        if kind not in left_out and (image := picture(draw, shown)):
            yield kind, image


def _few(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the contenders of the first settings, up to the limits of a picture, with rules in their labels."""
    settings: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for row in rows:
        settings.setdefault((row["temperature"], row["batch"]), []).append({**row, "label": _label_with_rule(row)})
    return [row for rows in list(settings.values())[:_SETTINGS] for row in rows[:_CONTENDERS]]


def _label_with_rule(row: dict[str, Any]) -> str:
    return row["label"] + ("" if row["rule"] == "match" else f" under {row['rule']}")


def _comparison(names: Sequence[str], runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the HTML of a table of all contenders, with tokens/s and speedup per file."""
    rows_by_file: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for number, results in enumerate(runs):
        for row in results["runs"]:
            key = (row["label"], row["rule"], f"{row['temperature']:g}", str(row["batch"]))
            rows_by_file.setdefault(key, {}).setdefault(number, row)
    yield "<h2>Side by side</h2><p>tokens/s, and speedup over plain decoding in the same run. Absolute numbers of "
    yield "different machines are not comparable.</p>"
    heads = [part for name in names for part in (f"{name}: tokens/s", "speedup")]
    lines = [
        [*key, *(cell for number in range(len(runs)) for cell in _speeds(by_file.get(number)))]
        for key, by_file in rows_by_file.items()
    ]
    yield _table(["drafter", "rule", "temperature", "batch", *heads], lines)


def _speeds(row: dict[str, Any] | None) -> tuple[str, str]:
    return (f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}x") if row else ("", "")


def _section(name: str, results: dict[str, Any], images: dict[str, bytes]) -> str:
    machine = results["machine"]
    processors = ", ".join(str(machine[key]) for key in ("gpu", "cpu") if machine[key])
    cores = f", {machine['cores']} cores" if machine["cores"] else ""
    questions = f"{counted(results['questions'], 'question')}, {results['max_new_tokens']} new tokens"
    facts = [
        f"{results['model']} ({results['dtype'] or 'dtype not recorded'}), {questions}",
        f"{processors}{cores}",
        f"commit {results['commit']}" if results["commit"] else "",
    ]
    lines = "".join(f"<p>{escape(fact)}</p>" for fact in facts if fact)
    command = f"<p><code>{escape(results['command'])}</code></p>" if results["command"] else ""
    figures = "".join(
        f'<figure><img alt="{escape(PICTURES[kind][1])}" src="data:image/png;base64,{b64encode(image).decode()}">'
        f"<figcaption>{escape(PICTURES[kind][1])}</figcaption></figure>"
        for kind, image in images.items()
    )
    heads = [
        "contender",
        "T",
        "batch",
        "tokens/s",
        "speedup",
        "tau",
        "first token, ms",
        "between tokens p50",
        "p95",
        "p99",
    ]
    table = _table([*heads, "of the floor", "memory, MiB", "identical"], map(_cells, results["runs"]))
    beside = _side_by_side(results["preset"]) if results["preset"] else ""
    return f"<h2>{escape(name)}</h2>{lines}{command}{beside}{table}{figures}"


def _side_by_side(preset: dict[str, Any]) -> str:
    """Returns the HTML of a preset: published beside measured numbers."""
    figures = ("T", "batch", "speedup", "tau", "efficiency")
    heads = [
        "method",
        "model",
        "task",
        *figures,
        "quality",
        "note",
        "measured",
        *figures,
        "agreement",
        "log-likelihood",
    ]
    lines = []
    for row in preset["rows"]:
        theirs, ours = row["published"], row["measured"]
        model, task, quality, note = (theirs[key] or "" for key in ("model", "task", "quality", "note"))
        contender = (ours["label"] or "") + (
            f" under {ours['rule']}" if ours["rule"] not in ("match", "", None) else ""
        )
        same, nats = ours["agreement"], ours["log_likelihood"]
        judged = ["" if same is None else f"{same:.1%}", "" if nats is None else f"{nats:.3f}"]
        published = [row["method"] or "", model, task, *preset_figures(theirs), quality, note]
        lines.append([*published, contender, *preset_figures(ours), *judged])
    return f"<h3>{escape(preset['name'] or '')}: {escape(preset['about'] or '')}</h3>{_table(heads, lines)}"


def _cells(row: dict[str, Any]) -> list[str]:
    gaps = row["token_gap_ms"]
    memory = row["peak_memory_bytes"]
    floor = row["floor_fraction"]
    return [
        _label_with_rule(row),
        f"{row['temperature']:g}",
        str(row["batch"]),
        *_speeds(row),
        f"{row['tau']:.2f}" if row["tau"] else "",
        *(_ms(ms) for ms in (row["first_token_ms"], *(gaps.get(share) for share in ("p50", "p95", "p99")))),
        f"{floor:.0%}" if floor else "",
        f"{memory / 2**20:.0f}" if memory else "",
        row["identical"] or "",
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
