"""One run of the benchmark: all measurements on one loaded model, as JSON values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from specengine._C import PAGE_SIZE
from specengine.bench.kernels.bandwidth import bandwidth
from specengine.bench.kernels.rows import PREFIX, time_linear, time_rows
from specengine.bench.machine import OthersCPU
from specengine.bench.peers.base import Peer
from specengine.bench.peers.registry import open_peers
from specengine.bench.quality.agreement import quality_rows
from specengine.bench.race.contenders import BASE, CONTROL, Contender
from specengine.bench.race.measure import RaceSettings, calls_of, measure
from specengine.bench.race.memory import measure_memory
from specengine.bench.race.prefill import long_prompt, time_prefill
from specengine.bench.race.questions import Question
from specengine.bench.race.run import Run
from specengine.bench.race.token_sources import token_sources
from specengine.bench.report.labels import short_labels
from specengine.bench.report.run_dicts import run_dicts
from specengine.tensor_parallel.loading import LoadedModel
from specengine.tokenizer import Tokenizer
from specengine.types import SamplingParams
from specengine.utils.build_info import build_info

_COLUMNS = (*Progress.get_default_columns(), MofNCompleteColumn())


@dataclass(frozen=True)
class Plan:
    """Lists the measurements of a suite.

    quality: whether to measure the quality of the text.  prefill: tokens of a prompt to time, None for no prompt.
    rows: numbers of rows of a pass to time, after `prefix` cached tokens.  memory: whether to measure peak memory.
    """

    contenders: Sequence[Contender]
    settings: RaceSettings
    peers: Sequence[str] = ()
    quality: bool = False
    prefill: int | None = None
    rows: Sequence[int] = ()
    prefix: int = PREFIX
    memory: bool = False


def run_suite(plan: Plan, model: LoadedModel, questions: Sequence[Question], params: SamplingParams) -> dict[str, Any]:
    """Returns all results and their settings. Raises ValueError for a plan that this model cannot carry out."""
    others = OthersCPU()
    # Cheap checks come first, because a race takes minutes.
    if plan.memory and model.target.ops.on_device:
        raise ValueError("memory: on CUDA every configuration takes what gpu_memory_fraction allows; use --device cpu")
    prompt = long_prompt(model, plan.prefill) if plan.prefill is not None else None
    passes = time_rows(model.target, plan.rows, plan.prefix) if plan.rows else []
    linears = time_linear(model.target) if plan.rows else []
    with TemporaryDirectory(prefix="specengine-bench-") as scratch:
        peers, left_out = _open_peers(plan, model, Path(scratch))
        with _progress(_calls(plan, questions, len(peers))) as advance:
            runs = measure(model, plan.contenders, questions, params, plan.settings, peers=peers, advance=advance)
            quality = quality_rows(model.target, runs, advance) if plan.quality else []
        if plan.memory:
            measure_memory(runs, model.name, model.dtype)
        drafters = list(dict.fromkeys(each.drafter for each in plan.contenders))
        prefills = time_prefill(model, drafters, peers, prompt, plan.settings.repetitions) if prompt else []
    others_cpu = others.cores()
    weight_bytes = model.target.weight_bytes()
    token_bytes = model.target.new_cache(0, 0).page_bytes / PAGE_SIZE
    speed = bandwidth(model.target.device)
    rows = run_dicts(runs, floor_seconds=weight_bytes / speed, token_seconds=token_bytes / speed)
    return {
        "questions": len(questions),
        "max_new_tokens": params.max_new_tokens,
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
        "adapter": params.adapter,
        "repetitions": plan.settings.repetitions,
        "dtype": model.dtype,
        "device": str(model.target.device),
        "weight_bytes": weight_bytes,
        "read_bytes_per_second": speed,
        "others_cpu": others_cpu,
        "device_memory_bytes": torch.cuda.max_memory_reserved(model.target.device)
        if model.target.ops.on_device
        else None,
        "peers": {peer.mode: peer.about for peer in peers if not peer.failed},
        "peers_left_out": {**left_out, **{peer.mode: peer.failed for peer in peers if peer.failed}},
        "runs": [row | each for row, each in zip(rows, quality, strict=True)] if quality else rows,
        "example": None if plan.quality else _example(runs, questions[0].name, model.tokenizer),
        "prefill": prefills,
        "rows": passes,
        "one_row_linear": linears,
    }


def _calls(plan: Plan, questions: Sequence[Question], peers: int) -> int:
    """Returns the length of the progress bar."""
    contenders = len(plan.contenders)
    calls = calls_of(questions, plan.settings, contenders, peers)
    if plan.quality:
        calls += len(plan.settings.batches) * contenders
    return len(plan.settings.temperatures) * calls


def _example(runs: Sequence[Run], question: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns one answer by each drafter, token by token, at the first temperature and batch size."""
    ours = [run for run in runs if run.peer is None and run.drafter not in (BASE, CONTROL)]
    ours = [run for run in ours if (run.temperature, run.batch) == (ours[0].temperature, ours[0].batch)]
    labels = short_labels([run.drafter for run in ours])
    tokens = {}
    for label, run in zip(labels, ours, strict=True):
        name = run.drafter.partition(":")[0].partition(",")[0]
        label = f"{label} under {run.rule}" if run.rule != "match" else label
        tokens[label] = token_sources(run.answers[0, 0, 0], name, tokenizer)
    return {"question": question, "tokens": tokens}


def _open_peers(plan: Plan, model: LoadedModel, scratch: Path) -> tuple[list[Peer], dict[str, str]]:
    if 1 in plan.settings.batches:
        return open_peers(plan.peers, model, build_info()["threads"], scratch)
    return [], dict.fromkeys(plan.peers, "peers are measured at batch 1, which this run does not have")


@contextmanager
def _progress(calls: int) -> Iterator[Callable[[], None]]:
    with Progress(*_COLUMNS, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=calls)
        yield lambda: bar.advance(task)
