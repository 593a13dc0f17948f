"""`python -m specengine.bench`."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import typer
from rich.console import Console

from specengine.bench.machine import commit, machine, versions
from specengine.bench.modes import Outcome, measure_kernels, measure_perplexity, measure_suite, model_gpu
from specengine.bench.options import Options, takes_options
from specengine.bench.report.plot import save
from specengine.bench.report.plot_drafters import drafters_figure
from specengine.bench.report.plot_rules import rules_figure
from specengine.bench.report.writing import write_json
from specengine.types import ModelFetchError
from specengine.utils.console import note, one_line_errors

_PIPE_WIDTH = 200  # columns
_QUIET_CORES = 0.1  # cores that other processes may use before a warning

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@takes_options
def bench(options: Options) -> None:
    """Measure drafters, and other engines, against plain decoding on the same questions, and compare their answers."""
    with one_line_errors(ModelFetchError):
        options.check()
        command = shlex.join(["python", "-m", "specengine.bench", *sys.argv[1:]])
        about = {"command": command, "machine": machine(), "versions": versions(), "commit": commit()}
        if options.gpu_model:
            outcome = model_gpu(options.gpu_model)
        elif options.kernels:
            outcome = measure_kernels(options)
        elif options.perplexity:
            outcome = measure_perplexity(options)
        else:
            outcome = measure_suite(options)
        results = about | outcome.results
        _show(outcome, results)
        if options.json_file:
            write_json(options.json_file, results)
        if options.plot:
            save(rules_figure if outcome.quality else drafters_figure, results, options.plot)


def _show(outcome: Outcome, results: dict[str, Any]) -> None:
    """Prints tables and warnings."""
    # Rich assumes 80 columns for a pipe, which would cut the numbers.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    for table in outcome.tables:
        console.print(table)
    others = results.get("others_cpu") or 0
    if others > _QUIET_CORES:
        console.print(
            f"not a quiet machine: other processes used {others:.1f} cores, which slows parallel engines most"
        )
    if memory := results.get("device_memory_bytes"):
        console.print(f"all engines together took at most {memory / 2**30:.1f} GiB of the device's memory")
    for mode, reason in results.get("peers_left_out", {}).items():
        note(f"left out: {mode}: {reason}")


if __name__ == "__main__":
    app()
