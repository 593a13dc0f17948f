"""`python -m specengine.bench`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from specengine.bench.machine import commit, machine, read_bandwidth, versions
from specengine.bench.questions import BUILT_IN, load_questions
from specengine.bench.report import run_dicts, table, write_json
from specengine.bench.run import calls_of, measure, split_drafters
from specengine.console import one_line_errors
from specengine.models.loading import load_model
from specengine.types import SamplingParams

_PIPE_WIDTH = 160  # columns
_COLUMNS = (*Progress.get_default_columns(), MofNCompleteColumn())

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def bench(
    model: Annotated[str, typer.Option(help="As for `specengine generate`.")] = "smollm2-135m",
    drafters: Annotated[
        str,
        typer.Option(
            help="Comma-separated; an item option=value belongs to the drafter before it: "
            "none,prompt_lookup,nodes=16. none is always there."
        ),
    ] = "none,prompt_lookup",
    questions: Annotated[
        Path | None,
        typer.Option(help="JSONL in MT-bench form, one object with `turns` per line; else built-in ones."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Per turn.")] = 128,
    temperature: float = 0.0,
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1",
    repetitions: int = 3,
    rule: str = "match",
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer gets all its tokens.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the results here.")] = None,
) -> None:
    """Measure drafters against plain decoding on the same questions, and compare their answers."""
    with one_line_errors():
        if json_file and not (json_file.absolute().parent.is_dir() and os.access(json_file.absolute().parent, os.W_OK)):
            raise ValueError(f"json: cannot write {str(json_file)!r}, its folder does not exist or is read-only")
        names, sizes = split_drafters(drafters), _sizes(batch)
        asked = load_questions(questions or BUILT_IN, limit)
        params = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos
        )
        loaded = load_model(model, device=device, dtype=dtype)
        with Progress(*_COLUMNS, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("measuring", total=calls_of(asked, len(names), sizes, repetitions))
            runs = measure(
                *(loaded, names, asked, params),
                batches=sizes,
                repetitions=repetitions,
                rule=rule,
                advance=lambda: bar.advance(task),
            )
        weight_bytes, bandwidth = loaded.target.weight_bytes(), read_bandwidth(loaded.target.device)
        rows = run_dicts(runs, rule=rule, temperature=temperature, floor_seconds=weight_bytes / bandwidth)
        dtype_name = loaded.dtype
        device_name = str(loaded.target.device)
        title = f"{model}, {dtype_name} on {device_name}, temperature {temperature:g}, {len(asked)} questions"
        # Rich takes a pipe for 80 columns, which would cut the numbers.
        wide = None if sys.stdout.isatty() else _PIPE_WIDTH
        Console(width=wide, highlight=False).print(table(rows, title))
        if json_file:
            settings = {
                "questions_file": str(questions) if questions else "built-in",
                "questions": len(asked),
                "max_new_tokens": max_new_tokens,
                "seed": seed,
                "ignore_eos": ignore_eos,
                "repetitions": repetitions,
                "dtype": dtype_name,
                "device": device_name,
                "weight_bytes": weight_bytes,
                "read_bytes_per_second": bandwidth,
            }
            about = {"machine": machine(), "versions": versions(), "commit": commit(), "model": model}
            write_json(json_file, {**about, **settings, "runs": rows})


def _sizes(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(size) for size in text.split(",")))
    except ValueError:
        raise ValueError(f"batch: expected sizes separated by commas, got {text!r}") from None


if __name__ == "__main__":
    app()
