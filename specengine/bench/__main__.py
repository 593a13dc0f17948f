"""`python -m specengine.bench`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specengine.bench.kernels.rows import PREFIX, rows_table
from specengine.bench.kernels.run import kernels_table, time_kernels
from specengine.bench.machine import bandwidth, commit, machine, versions
from specengine.bench.peers import split_peers
from specengine.bench.presets import PRESETS, named, side_by_side
from specengine.bench.quality.agreement import rules_table
from specengine.bench.quality.perplexity import perplexities, perplexity_table
from specengine.bench.race.latency import latency_table
from specengine.bench.race.prefill import prefill_table
from specengine.bench.race.questions import BUILT_IN, RANDOM_TOKENS, load_files
from specengine.bench.race.rule_sweep import race, split_rules
from specengine.bench.race.run import split_drafters
from specengine.bench.report.json import write_json
from specengine.bench.report.labels import counted
from specengine.bench.report.plot import check_matplotlib, save
from specengine.bench.report.plot_drafters import drafters_figure
from specengine.bench.report.plot_rules import rules_figure
from specengine.bench.report.tables import acceptance_table, peers_table, preset_table, table
from specengine.bench.suite import Plan, run_plan
from specengine.tensor_parallel.loading import load_model, resolve_device
from specengine.types import SamplingParams
from specengine.utils.console import note, one_line_errors

MODEL, GPU_MODEL, DRAFTERS = "smollm2-135m", "random:llama-3.1-8b", "none,prompt_lookup"
_PIPE_WIDTH = 200  # columns
_QUIET = 0.1  # cores that others may use before it is worth a word

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def bench(
    model: Annotated[
        str | None,
        typer.Option(
            show_default=MODEL,
            help="As for `specengine generate`; of a preset on a GPU it is random:llama-3.1-8b if none is named.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"The contenders behind a published table, and what was published beside what is measured: "
            f"{', '.join(PRESETS)}. --temperature and --batch may name others than its own.",
        ),
    ] = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            show_default=DRAFTERS,
            help="Comma-separated; an item option=value belongs to the drafter before it: "
            "none,prompt_lookup,nodes=16. none is always there. synthetic:0.8,0.7,k=10 drafts levels of k tokens that "
            "are accepted with these probabilities, which changes the text. control is plain decoding once more, in an "
            "engine of its own: what a ratio near 1 means.",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="Other engines in the same race, at batch 1: transformers, llama.cpp; a weight format after a colon: "
            "llama.cpp:Q8_0, transformers:bfloat16. What cannot run is left out with a reason."
        ),
    ] = "",
    questions: Annotated[
        str | None,
        typer.Option(
            help="JSONL files in MT-bench form, comma-separated: one object with `turns` per line, and a `category` "
            "(else the file's name); else built-in ones."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many questions of each file.")] = None,
    per_class: Annotated[int | None, typer.Option(help="Only the first so many questions of each class.")] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Random tokens of a turn, where the model has no tokenizer to read questions with.")
    ] = RANDOM_TOKENS,
    max_new_tokens: Annotated[int, typer.Option(help="Per turn.")] = 128,
    temperature: Annotated[
        str | None, typer.Option(show_default="0", help="Comma-separated; peers draw with their own samplers.")
    ] = None,
    batch: Annotated[str | None, typer.Option(show_default="1", help="Comma-separated batch sizes.")] = None,
    repetitions: int = 3,
    rule: Annotated[str | None, typer.Option(show_default="match", help="Of all drafters.")] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="Instead, compare rules, and what they do to the text: separated by spaces, several "
            "values by slashes, as in 'margin:theta=0.84/0.9 cascade:opt,alpha=0.1'. Each has the first drafter that "
            "serves it, and the exact rule beside it. token-cascade:chow and seq-cascade:chow are sequential."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG",
            help="Acceptance by depth, tau, speedup and the time of a cycle; with --rules: quality against speed "
            "(needs matplotlib).",
        ),
    ] = None,
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer gets all its tokens.")] = False,
    prefill: Annotated[int | None, typer.Option(help="Also time a prompt of so many tokens.")] = None,
    rows: Annotated[str, typer.Option(help="Also time a pass by its rows: 1,2,4,8,16,32.")] = "",
    prefix: Annotated[int, typer.Option(help="Tokens in the cache of such a pass.")] = PREFIX,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also each drafter's peak memory, in a process of its own.")
    ] = False,
    perplexity: Annotated[
        bool, typer.Option("--perplexity", help="Only this: the model's perplexity in every dtype (or in --dtype).")
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Only this: every op of the device against PyTorch and the bytes it moves."),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the results here.")] = None,
) -> None:
    """Measure drafters, and other engines, against plain decoding on the same questions, and compare their answers."""
    with one_line_errors():
        for name, file in (("json", json_file), ("plot", plot)):
            if file and not (file.absolute().parent.is_dir() and os.access(file.absolute().parent, os.W_OK)):
                raise ValueError(f"{name}: cannot write {str(file)!r}, its folder does not exist or is read-only")
        if plot:
            if kernels or perplexity:
                raise ValueError("plot: expected a run of drafters or rules, not --kernels or --perplexity")
            check_matplotlib()
        chosen = named(preset) if preset else None
        if chosen and (drafters or rule or rules or kernels or perplexity):
            raise ValueError("preset: has drafters and rules of its own, and measures nothing else")
        model = model or (GPU_MODEL if chosen and resolve_device(device).type == "cuda" else MODEL)
        command = shlex.join(["python", "-m", "specengine.bench", *sys.argv[1:]])
        results: dict[str, Any] = {"command": command, "machine": machine(), "versions": versions(), "commit": commit()}
        if kernels:
            place = resolve_device(device)
            speed = bandwidth(place)
            results |= {"device": place.type, "bytes_per_second": speed, "kernels": time_kernels(place, speed)}
            tables = [kernels_table(results["kernels"], speed)]
        elif perplexity:
            results["model"] = model
            results["perplexity"] = perplexities(model, device=device, dtype=dtype)
            tables = [perplexity_table(results["perplexity"], f"{model}, perplexity of the text in the package")]
        else:
            loaded = load_model(model, device=device, dtype=dtype)
            temperatures: Sequence[float] = _numbers("temperature", temperature, float) if temperature else [0.0]
            batches: Sequence[int] = _numbers("batch", batch) if batch else [1]
            quality = bool(rules)
            if chosen:
                contenders, quality = chosen.contenders(model), chosen.quality
                temperatures = temperatures if temperature else chosen.temperatures
                batches = batches if batch else chosen.batches
            elif rules:
                contenders = race(split_rules(rules), split_drafters(drafters or DRAFTERS), loaded.target)
            else:
                contenders = [(name, rule or "match") for name in split_drafters(drafters or DRAFTERS)]
            plan = Plan(
                drafters=[name for name, _ in contenders],
                rules=[each for _, each in contenders],
                quality=quality,
                temperatures=temperatures,
                peers=split_peers(peers),
                batches=batches,
                repetitions=repetitions,
                prefill=prefill,
                rows=_numbers("rows", rows) if rows else [],
                prefix=prefix,
                memory=memory,
            )
            files = [Path(part.strip()) for part in questions.split(",")] if questions else [BUILT_IN]
            asked = load_files(files, limit, per_class, prompt_tokens)
            params = SamplingParams(max_new_tokens=max_new_tokens, seed=seed, ignore_eos=ignore_eos)
            results["model"] = model
            results["questions_file"] = ", ".join(file.name for file in files) if questions else "built-in"
            results |= run_plan(plan, loaded, asked, params)
            results["preset"] = side_by_side(preset, model, results["runs"]) if preset else None
            tables = [*_tables(results)]
        # Rich takes a pipe for 80 columns, which would cut the numbers.
        console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
        for each in tables:
            console.print(each)
        if (results.get("others_cpu") or 0) > _QUIET:
            used = f"other processes took {results['others_cpu']:.1f} cores meanwhile"
            console.print(f"not a quiet machine: {used}, and engines whose threads wait for each other suffer most")
        if taken := results.get("device_memory_bytes"):
            console.print(f"all engines together took {taken / 2**30:.1f} GiB of the device's memory at most")
        for mode, why in results.get("peers_left_out", {}).items():
            note(f"left out: {mode}: {why}")
        if json_file:
            write_json(json_file, results)
        if plot:
            save(rules_figure if quality else drafters_figure, results, plot)


def _tables(results: dict[str, Any]) -> Iterator[Table]:
    for temperature in dict.fromkeys(row["temperature"] for row in results["runs"]):
        runs = [row for row in results["runs"] if row["temperature"] == temperature]
        what = f"{results['dtype']} on {results['device']}, temperature {temperature:g}"
        title = f"{results['model']}, {what}, {counted(results['questions'], 'question')}"
        if "family" in runs[0]:
            yield rules_table(runs, title)
        else:
            yield table(runs, title)
            if any(row["level_acceptance"] for row in runs):
                yield acceptance_table(runs)
            yield latency_table(runs)
        if any(row["speedup_over"] for row in runs):
            yield peers_table(runs)
    if results["preset"]:
        yield preset_table(results["preset"])
    if results["prefill"]:
        yield prefill_table(results["prefill"])
    if results["rows"]:
        yield rows_table(results["rows"], results["one_row_linear"])


def _numbers(name: str, text: str, kind: type = int) -> list:
    try:
        return list(dict.fromkeys(kind(number) for number in text.split(",")))
    except ValueError:
        raise ValueError(f"{name}: expected numbers separated by commas, got {text!r}") from None


if __name__ == "__main__":
    app()
