"""Rewrites every table that comes from recorded runs, the index of these runs, and the picture of speed.

    python bench/readme_table.py [RESULT.json]

The tables lie in pages of docs and of bench/results. A table stands between `<!-- bench: results/NAME.json -->` and
`<!-- bench end -->`, the index in bench/results/README.md between `<!-- bench index -->` and the same. An argument
replaces the file of the first table of docs/benchmarks.md.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import speed_picture
from gpu_tables import gpu_lines

from specengine.bench.gpu_model.markdown import model_lines
from specengine.bench.report.labels import counted
from specengine.bench.report.tables import is_judged, preset_figures, quality_figures

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent / "docs" / "benchmarks.md"
INDEX = HERE / "results" / "README.md"
PAGES = (
    BENCHMARKS,
    *(HERE / "results" / f"{name}.md" for name in ("rules", "published", "kernels")),
    *(HERE.parent / "docs" / f"{name}.md" for name in ("server", "replicas", "gpu", "models", "training")),
)
BLOCK = re.compile(r"<!-- bench: (?P<file>\S+) -->\n.*?<!-- bench end -->", re.DOTALL)
INDEXED = re.compile(r"<!-- bench index -->\n.*?<!-- bench end -->", re.DOTALL)
KINDS = {  # results of other programs, by a key that only they have
    "perplexity": "perplexity of {model} in every dtype",
    "trained": "{model}: drafters trained on the same text",
    "kernels": "every op against PyTorch, and the bytes it moves",
    "nvcc": "registers and spills of the CUDA kernels, as compiled",
    "unequal": "{model}: random constrained requests with every drafter, judged and compared with plain decoding",
    "drafters": "memory of the drafters' pools after many tokens",
    "records": "{model}: memory and slots of states while requests come, end and are cancelled",
    "streams": "{model}: many concurrent streams, some cancelled",
    "inputs": "damaged files and arguments: inputs tried and faults found",
    "clients": "{model}: the server under load, with clients that go away",
    "servers": "{model}: the server beside llama.cpp's, by concurrency",
    "planted_bugs": "planted bugs, and which test catches each",
    "kills": "{model}: processes of a tensor-parallel engine killed at random points",
    "replicas": "{model}: tokens per second of one and two replicas on Ray Serve",
    "modelled_goals": "cycles on one H200, modelled from counts of the simulator; nothing measured",
    "gpu_steps": "one H200: checks, tests, cycles and their kernels",
    "formats": "{model}: weight formats, their speed and perplexity",
    "passes": "{model}: passes of a mixture by rows, beside their bytes and what the policy expects",
    "variants": "{model}: Ouroboros with and without each of its mechanisms",
}
PEERS = "The peers use other arithmetic, so their texts eventually differ from ours."
PHASES = ("draft", "verify", "accept", "compact", "host")
DEPTHS = 6
COLUMNS = 145  # of a line of prose on a page
FIGURES = ("T", "batch", "speedup", "tau", "speedup / tau")


def rewritten(text: str) -> str:
    """Returns the text with every table rewritten from its file. Raises ValueError if the text has no table."""
    if not BLOCK.search(text):
        raise ValueError("no table between <!-- bench: FILE --> and <!-- bench end -->")
    return BLOCK.sub(lambda found: _block(found["file"]), text)


def with_file(text: str, name: str) -> str:
    """Returns the text with another file named for its first table."""
    return re.sub(r"(?<=<!-- bench: )\S+(?= -->)", lambda _: name, text, count=1)


def _block(name: str) -> str:
    data = json.loads((HERE / name).read_text(encoding="utf-8"))
    if "kernels" in data:
        lines = _kernel_lines
    elif "trained" in data:
        lines = _trained_lines
    elif "servers" in data:
        lines = _server_lines
    elif "clients" in data:
        lines = _load_lines
    elif "modelled_goals" in data:
        lines = model_lines
    elif "gpu_steps" in data:
        lines = gpu_lines
    elif "replicas" in data:
        lines = _replica_lines
    elif "formats" in data:
        lines = _format_lines
    elif data.get("preset"):
        lines = _preset_lines
    else:
        lines = _rule_lines if "family" in data["runs"][0] else _lines
    return "\n".join([f"<!-- bench: {name} -->", *lines(data, name), "<!-- bench end -->"])


def indexed(text: str, folder: Path = HERE / "results") -> str:
    """Returns the text with its index rewritten from a folder of results.

    Raises ValueError if the text has no index or a file is of an unknown kind.
    """
    if not INDEXED.search(text):
        raise ValueError("no index between <!-- bench index --> and <!-- bench end -->")
    rows = [
        f"| [`{file.name}`]({file.name}) | {what} | {commit} |"
        for file in sorted(folder.glob("*.json"))
        for what, commit in [_about(file)]
    ]
    lines = [
        "<!-- bench index -->",
        "| file | what was measured | commit |",
        "|---|---|---|",
        *rows,
        "<!-- bench end -->",
    ]
    return INDEXED.sub(lambda _: "\n".join(lines), text)


def _about(file: Path) -> tuple[str, str]:
    """Describes a result file; also returns the commit that was measured."""
    data = json.loads(file.read_text(encoding="utf-8"))
    commit, *dirty = (data.get("commit") or "not recorded").split("-")
    commit = "-".join([commit[:12], *dirty])
    if "runs" not in data or "trained" in data:
        kind = next((what for key, what in KINDS.items() if key in data), None)
        if kind is None:
            raise ValueError(f"{file}: neither runs nor one of {', '.join(KINDS)}")
        return kind.format(model=Path(data.get("model", "")).name), commit
    rows = data["runs"]
    settings = [
        f"{name} {', '.join(f'{value:g}' for value in values)}"
        for name, key in (("temperature", "temperature"), ("batch", "batch"))
        if (values := list(dict.fromkeys(row[key] for row in rows))) != [1]
    ]
    contenders = len({(row["peer"], row["drafter"], row["rule"]) for row in rows})
    peers = len({row["peer"] for row in rows} - {None})
    who = f"{contenders} contenders" + (f" ({peers} of them peers)" if peers else "")
    preset = f"{data['preset']['name']}: " if data.get("preset") else ""
    what = f"{preset}{Path(data['model']).name} ({data['dtype']}, {data['device']}), {who}"
    return f"{what}, {counted(data['questions'], 'question')}, {'; '.join(settings)}", commit


def _format_lines(data: dict[str, Any], name: str) -> list[str]:
    rates = {(row["model"], row["drafter"]): row for row in data["race"]}
    first = data["race"][0]["model"]
    control = data["race"][1]
    rows = [
        f"| {Path(each['model']).name} | {', '.join(each['formats_auto'])} | {each['mib_auto']:.0f} "
        f"| {each['perplexity_auto']:.2f} | {100 * (each['ratio'] - 1):+.2f} % "
        f"| {rates[each['model'], 'none']['over_first'] if each['model'] != first else 1:.2f}x "
        f"| {rates[each['model'], 'auto']['over_first']:.2f}x |"
        for each in data["formats"]
    ]
    same = all(row["same_text_as_plain"] for row in data["race"])
    lead = (
        f"{_where(data)}, greedy, {len(control['rounds'])} interleaved rounds. Speeds are ratios to plain decoding of "
        f"{Path(first).name}; its second run, the control, had {control['over_first']:.2f}x. Perplexity of the codes "
        "stands beside that of the same weights as float32."
    )
    return [
        *textwrap.wrap(lead, COLUMNS),
        "",
        "| model | kept as | MiB per token | perplexity | over float32 | plain | `auto` |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"All texts with drafts {'are' if same else 'are NOT'} those without (`bench/{name}`).",
    ]


def _trained_lines(data: dict[str, Any], name: str) -> list[str]:
    races = {row["label"]: row for row in data["runs"]}
    rows = []
    for each in data["trained"]:
        report = each["held_out"]
        ran = [races[label] for label in each["runs"]]
        columns = [
            each["name"],
            f"{each['parameters'] / 1e6:.1f}",
            f"{each['tokens'] / 1000:.0f}",
            " ".join(f"{share:.2f}" for share in report["acceptance"]),
            f"{report['tau']:.2f}",
            " / ".join(f"{row['tau']:.2f}" for row in ran),
            " / ".join(f"{row['ms_per_cycle']['draft']:.2f}" for row in ran),
            " / ".join(f"{row['speedup']:.2f}x" for row in ran),
        ]
        rows.append(f"| {' | '.join(columns)} |")
    lead = f"{_where(data)}, {data['questions']} questions, greedy. Two numbers are those of a chain and of a tree."
    heads = ("drafter", "M parameters", "k tokens", "held-out acceptance", "held-out tau", "tau", "draft ms", "speed")
    return [
        *textwrap.wrap(lead, COLUMNS),
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *rows,
        "",
        f"Speeds are ratios to plain decoding in the same run (`bench/{name}`).",
    ]


def _lines(data: dict[str, Any], name: str) -> list[str]:
    runs = data["runs"]
    turns = runs[0]["identical"].partition("/")[2]
    groups: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for row in runs:
        groups.setdefault((row["temperature"], row["batch"]), []).append(row)
    kind = "built-in prompts" if data["questions_file"] == "built-in" else "questions"
    weights = "in its file's own dtype" if data["dtype"] == "auto" else f"in {data['dtype']}"
    what = f"{Path(data['model']).name} {weights}, {data['questions']} {kind} ({turns} turns)"
    leads = [f"{_where(data)}, {what}, {data['max_new_tokens']} new tokens, "]
    for first, *_ in list(groups.values())[1:]:
        own = first["identical"].partition("/")[2]
        leads.append("The same, " if own == turns else f"The same, {own} turns to fill the batches, ")
    return [
        *(line for lead, rows in zip(leads, groups.values(), strict=True) for line in _table(lead, rows)),
        *([PEERS, ""] if any(row["peer"] for row in runs) else []),
        *_prefills(data),
        *_rows(data),
        f"Absolute figures depend on the machine; ratios are from one run (`bench/{name}`).",
    ]


def _table(lead: str, rows: list[dict[str, Any]]) -> list[str]:
    temperature, batch = rows[0]["temperature"], rows[0]["batch"]
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    return [
        lead + sampling + (f", batch {batch}:" if batch > 1 else ":"),
        "",
        f"| drafter | tokens/s | speedup | tau | ms per cycle: {', '.join(PHASES)} | outputs identical |",
        "|---|---|---|---|---|---|",
        *(_row(row) for row in rows),
        "",
        *_acceptance(rows),
    ]


def _acceptance(rows: list[dict[str, Any]]) -> list[str]:
    drafted = [row for row in rows if row.get("level_acceptance")]  # missing in older runs
    if not drafted:
        return []
    return [
        "Acceptance of a node by its depth, given that its parent was accepted:",
        "",
        f"| drafter | {' | '.join(f'depth {depth}' for depth in range(1, DEPTHS + 1))} |",
        "|---" * (1 + DEPTHS) + "|",
        *(f"| {_who(row)} | {' | '.join(_shares(row))} |" for row in drafted),
        "",
    ]


def _shares(row: dict[str, Any]) -> list[str]:
    shares = ["" if share is None else f"{share:.2f}" for share in row["level_acceptance"][:DEPTHS]]
    return shares + [""] * (DEPTHS - len(shares))


def _where(data: dict[str, Any]) -> str:
    machine = data["machine"]
    return f"{machine['cores']} cores ({machine['instruction_set']}, {machine['cpu']})"


def _rule_lines(data: dict[str, Any], name: str) -> list[str]:
    runs = data["runs"]
    turns = runs[0]["identical"].partition("/")[2]
    what = f"{Path(data['model']).name}, {counted(data['questions'], 'question')} ({turns} turns)"
    often = f"{data['max_new_tokens']} new tokens, {data['repetitions']} repetitions"
    lines = [f"{_where(data)}, {what}, {often} (`bench/{name}`):", "", "```"]
    lines += [data["command"], "```", ""]
    for temperature in dict.fromkeys(row["temperature"] for row in runs):
        lines += [
            f"Temperature {temperature:g}:",
            "",
            "| rule | drafter | tokens/s | speedup | tau | accepted | relaxed | agreement | log-likelihood, nats |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_rule_row(row) for row in runs if row["temperature"] == temperature),
            "",
        ]
    return lines[:-1]


def _preset_lines(data: dict[str, Any], name: str) -> list[str]:
    """Puts published and measured figures side by side, as the run printed them."""
    preset, runs = data["preset"], data["runs"]
    what = f"{Path(data['model']).name}, {counted(data['questions'], 'question')}, {data['max_new_tokens']} new tokens"
    judged = is_judged(preset)
    quality = ("agreement", "log-likelihood, nats") if judged else ()
    heads = ("method", "published: model, task", *FIGURES, "measured: drafter", *FIGURES, *quality)
    lines = [f"{_where(data)}, {what}, {data['repetitions']} repetitions (`bench/{name}`):", "", "```"]
    lines += [data["command"], "```", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in preset["rows"]:
        theirs, ours = row["published"] or {}, row["measured"] or {}
        what = ", ".join(theirs[key] for key in ("model", "task", "quality") if theirs.get(key))
        who = f"`{ours['label']}`" if ours else ""
        if ours.get("rule", "match") != "match":
            who += f" under `{ours['rule']}`"
        cells = (row["method"] or "", what, *preset_figures(theirs), who, *preset_figures(ours))
        cells += (*quality_figures(ours),) if judged else ()
        lines.append(f"| {' | '.join(cells)} |")
    if least := preset["least"]:
        where = f"`{least['label']}`, temperature {least['temperature']:g}, batch {least['batch']}"
        lines += ["", f"Lowest speedup of an adaptive tree: {least['speedup']:.2f}x ({where})."]
        if control := preset.get("control"):  # missing in older runs
            lines[-1] += f" Plain decoding in a second engine: {control[0]:.2f}x to {control[1]:.2f}x."
    different = [_who(row) for row in runs if row["rule"] == "match" and not _all_identical(row)]
    return [*lines, "", f"Outputs that wrongly differ from plain decoding: {', '.join(different) or 'none'}."]


def _all_identical(row: dict[str, Any]) -> bool:
    same, _, turns = row["identical"].partition("/")
    return same == turns


def _kernel_lines(data: dict[str, Any], name: str) -> list[str]:
    lines = [f"{_where(data)}, memory gives {data['bytes_per_second'] / 1e9:.0f} GB/s (`bench/{name}`):", ""]
    lines += ["| op | size | us | PyTorch us | speedup | floor, MB | of memory | error |", "|---" * 8 + "|"]
    for row in data["kernels"]:
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        times = f"{row['us']:.1f} | {row['torch_us']:.1f} | {row['speedup']:.2f}x"
        share = f"{row['floor_bytes'] / 1e6:.3f} | {row['bandwidth_fraction']:.0%}"
        lines.append(f"| {row['kernel']} | {row['size']} | {times} | {share} | {error} |")
    return lines


def _server_lines(data: dict[str, Any], name: str) -> list[str]:
    return [
        f"{_where(data)}, {data['model']}, answers of {data['tokens']} tokens, medians of {data['rounds']} rounds "
        f"(`bench/{name}`):",
        "",
        *_throughputs([(row["server"], row) for row in data["servers"]], "server"),
    ]


def _replica_lines(data: dict[str, Any], name: str) -> list[str]:
    def who(row: dict[str, Any]) -> str:
        return f"{counted(row['replicas'], 'replica')}, {counted(row['cores_each'], 'core')} each"

    return [
        f"{_where(data)}, {data['model']}, `{data['drafter']}`, answers of {data['tokens']} tokens, medians of "
        f"{data['rounds']} rounds (`bench/{name}`):",
        "",
        *_throughputs([(who(row), row) for row in data["replicas"]], ""),
    ]


def _throughputs(rows: list[tuple[str, dict[str, Any]]], who: str) -> list[str]:
    """Tabulates tokens per second and the time to the first token, by requests at a time."""
    columns = list(dict.fromkeys(row["concurrency"] for _, row in rows))
    cells = {
        (label, row["concurrency"]): f"{row['tokens_per_second']:.0f}/s, {row['first_token_ms']:.0f} ms"
        for label, row in rows
    }
    return [
        f"| {who} | {' | '.join(f'{each} at a time' for each in columns)} |",
        "|---" * (1 + len(columns)) + "|",
        *(
            f"| {label} | {' | '.join(cells[label, each] for each in columns)} |"
            for label in dict.fromkeys(label for label, _ in rows)
        ),
    ]


def _load_lines(data: dict[str, Any], name: str) -> list[str]:
    first, between = data["first_token_ms"], data["between_tokens_ms"]
    refused = ", ".join(f"{count:,} times {status}" for status, count in data["refused"].items())
    sizes = [size / 1e6 for _, size in data["resident_bytes"]]
    later = sizes[len(sizes) // 4 :]
    return [
        f"{_where(data)}, {data['model']}, `{data['drafter']}`, {data['clients']} clients at a time (`bench/{name}`):",
        "",
        "| | |",
        "|---|---|",
        f"| seconds | {data['seconds']:.0f} |",
        f"| finished answers, each equal to the answer of its request run alone | {data['finished_and_equal']:,} |",
        f"| answers cancelled by their client | {data['left']:,} |",
        f"| refused | {refused} |",
        f"| tokens per second | {data['tokens_per_second']:.0f} |",
        f"| ms to the first token, p50 and p99 | {first['p50']:.0f}, {first['p99']:.0f} |",
        f"| ms between tokens, p50 and p99 | {between['p50']:.0f}, {between['p99']:.0f} |",
        f"| requests per cycle, tau | {data['sequences_per_cycle']:.1f}, {data['tau']:.2f} |",
        f"| MB resident after the first quarter: minimum, maximum | {min(later):.0f}, {max(later):.0f} |",
        f"| peak of the last quarter over peak of the second | {data['memory_growth']:.3f} |",
    ]


def _rule_row(row: dict[str, Any]) -> str:
    tau = f"{row['tau']:.2f}" if row["tau"] else ""
    relaxed = "" if row["relaxed"] is None else f"{row['relaxed']:.1%}"
    accepted = " ".join(share for share in _shares(row)[:3] if share) if row.get("level_acceptance") else ""
    speeds = f"{row['tokens_per_second']:.1f} | {row['speedup']:.2f}x | {tau} | {accepted}"
    quality = f"{relaxed} | {row['agreement']:.1%} | {row['log_likelihood']:.3f}"
    batch = f", batch {row['batch']}" if row["batch"] > 1 else ""
    return f"| `{row['rule']}` | `{row['drafter']}`{batch} | {speeds} | {quality} |"


def _prefills(data: dict[str, Any]) -> list[str]:
    found = data.get("prefill")
    if not found:
        return []
    each = (f"{row['peer'] or _label(row)} {1e3 * row['seconds']:.0f}" for row in found)
    tokens = found[0]["tokens"]
    told = f"Time to the first token of a prompt of {tokens} tokens, in ms: {', '.join(each)}."
    return [*textwrap.wrap(told, COLUMNS, break_on_hyphens=False), ""]


def _rows(data: dict[str, Any]) -> list[str]:
    found = data.get("rows")
    if not found:
        return []
    more = (f"{row['rows']} rows {row['ratio']:.2f}x" for row in found[1:])
    return [f"A pass of one row takes {found[0]['ms']:.2f} ms. Relative to it: {', '.join(more)}.", ""]


def _row(row: dict[str, Any]) -> str:
    ms = ", ".join(f"{row['ms_per_cycle'][phase]:.2f}" for phase in PHASES) if row["ms_per_cycle"] else ""
    tau = f"{row['tau']:.2f}" if row["tau"] else ""
    speeds = f"{row['tokens_per_second']:.1f} | {row['speedup']:.2f}x"
    return f"| {_who(row)} | {speeds} | {tau} | {ms} | {row['identical']} |"


def _who(row: dict[str, Any]) -> str:
    who = _label(row) if row["peer"] is None else row["peer"].replace("+", ", ")
    return who + (f", batch {row['batch']}" if row["batch"] > 1 else "")


def _label(row: dict[str, Any]) -> str:
    return f"`{row.get('label', row['drafter'])}`"  # missing in older runs


def main(arguments: list[str]) -> None:
    if arguments:
        name = Path(arguments[0]).resolve().relative_to(HERE).as_posix()
        BENCHMARKS.write_text(with_file(BENCHMARKS.read_text(encoding="utf-8"), name), encoding="utf-8")
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    INDEX.write_text(indexed(INDEX.read_text(encoding="utf-8")), encoding="utf-8")
    speed_picture.main()


if __name__ == "__main__":
    main(sys.argv[1:])
