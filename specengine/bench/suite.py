"""One run: everything that is measured on one loaded model, as JSON values."""

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
from specengine.bench.kernels.rows import PREFIX, time_linear, time_rows
from specengine.bench.machine import OthersCPU, bandwidth
from specengine.bench.peers import Peer, open_peers
from specengine.bench.quality.agreement import qualities
from specengine.bench.race.contenders import CONTROL
from specengine.bench.race.memory import measure_memory
from specengine.bench.race.prefill import long_prompt, time_prefill
from specengine.bench.race.questions import Question
from specengine.bench.race.run import BASE, Run, calls_of, measure
from specengine.bench.race.token_sources import provenance
from specengine.bench.report.json import run_dicts
from specengine.bench.report.labels import short_labels
from specengine.tensor_parallel.loading import LoadedModel
from specengine.tokenizer import Tokenizer
from specengine.types import SamplingParams
from specengine.utils.build_info import build_info

_COLUMNS = (*Progress.get_default_columns(), MofNCompleteColumn())


@dataclass(frozen=True)
class Plan:
    """What to measure.

    rules: one per drafter.  quality: also what they do to the text.
    prefill: tokens of a prompt to time, None for none.  rows: row counts to time, behind `prefix` tokens.
    memory: also each one's peak.
    """

    drafters: Sequence[str]
    peers: Sequence[str]
    batches: Sequence[int]
    repetitions: int
    rules: Sequence[str]
    temperatures: Sequence[float]
    quality: bool
    prefill: int | None
    rows: Sequence[int]
    prefix: int = PREFIX
    memory: bool = False


def run_plan(plan: Plan, model: LoadedModel, questions: Sequence[Question], params: SamplingParams) -> dict[str, Any]:
    """All results and the settings that belong to them. Raises ValueError for a plan that cannot be carried out."""
    others = OthersCPU()
    # What is cheap to refuse is refused before anything runs for minutes.
    if plan.memory and model.target.ops.resident:
        raise ValueError("memory: on CUDA every configuration takes what gpu_memory_fraction allows; use --device cpu")
    prompt = long_prompt(model, plan.prefill) if plan.prefill is not None else None
    passes = time_rows(model.target, plan.rows, plan.prefix) if plan.rows else []
    linears = time_linear(model.target) if plan.rows else []
    with TemporaryDirectory(prefix="specengine-bench-") as scratch:
        peers, left_out = _peers(plan, model, Path(scratch))
        calls = calls_of(questions, len(plan.drafters), plan.batches, plan.repetitions, len(peers))
        calls = len(plan.temperatures) * (calls + plan.quality * len(plan.batches) * len(plan.drafters))
        with _progress(calls) as advance:
            runs = measure(
                *(model, plan.drafters, questions, params),
                temperatures=plan.temperatures,
                batches=plan.batches,
                repetitions=plan.repetitions,
                rule=plan.rules,
                peers=peers,
                advance=advance,
            )
            found = qualities(model.target, runs, advance) if plan.quality else []
        if plan.memory:
            measure_memory(runs, model.name, model.dtype)
        drafters = list(dict.fromkeys(plan.drafters))
        prefills = time_prefill(model, drafters, peers, prompt, plan.repetitions) if prompt else []
    others_cpu = others.cores()
    weight_bytes, token_bytes = model.target.weight_bytes(), model.target.new_cache(0).page_bytes / PAGE_SIZE
    speed = bandwidth(model.target.device)
    floors = {"floor_seconds": weight_bytes / speed, "token_seconds": token_bytes / speed}
    return {
        "questions": len(questions),
        "max_new_tokens": params.max_new_tokens,
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
        "repetitions": plan.repetitions,
        "dtype": model.dtype,
        "device": str(model.target.device),
        "weight_bytes": weight_bytes,
        "read_bytes_per_second": speed,
        "others_cpu": others_cpu,
        "device_memory_bytes": torch.cuda.max_memory_reserved(model.target.device)
        if model.target.ops.resident
        else None,
        "peers": {peer.mode: peer.about for peer in peers if not peer.failed},
        "peers_left_out": {**left_out, **{peer.mode: peer.failed for peer in peers if peer.failed}},
        "runs": _rows(runs, found, floors),
        "example": None if plan.quality else _example(runs, questions[0].name, model.tokenizer),
        "prefill": prefills,
        "rows": passes,
        "one_row_linear": linears,
    }


def _rows(runs: Sequence[Run], found: Sequence[dict[str, Any]], floors: dict[str, float]) -> list[dict[str, Any]]:
    rows = run_dicts(runs, **floors)
    return [{**row, **quality} for row, quality in zip(rows, found, strict=True)] if found else rows


def _example(runs: Sequence[Run], question: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One answer by everybody who drafted it, token by token, at the first temperature and batch size."""
    ours = [run for run in runs if run.peer is None and run.drafter not in (BASE, CONTROL)]
    ours = [run for run in ours if (run.temperature, run.batch) == (ours[0].temperature, ours[0].batch)]
    labels = short_labels([run.drafter for run in ours])
    texts = {
        f"{label} under {run.rule}" if run.rule != "match" else label: provenance(
            run.answers[0, 0, 0], run.drafter.partition(":")[0].partition(",")[0], tokenizer
        )
        for label, run in zip(labels, ours, strict=True)
    }
    return {"question": question, "tokens": texts}


def _peers(plan: Plan, model: LoadedModel, scratch: Path) -> tuple[list[Peer], dict[str, str]]:
    if 1 in plan.batches:
        return open_peers(plan.peers, model, build_info()["threads"], scratch)
    return [], dict.fromkeys(plan.peers, "peers are measured at batch 1, which this run has not")


@contextmanager
def _progress(calls: int) -> Iterator[Callable[[], None]]:
    with Progress(*_COLUMNS, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=calls)
        yield lambda: bar.advance(task)
