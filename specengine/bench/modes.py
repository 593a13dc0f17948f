"""Modes of the command: it measures kernels, perplexity, or a suite of drafters and rules, or models a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from specengine.bench.gpu_model import report as gpu_report
from specengine.bench.gpu_model.constants import gpu_of
from specengine.bench.kernels.bandwidth import bandwidth
from specengine.bench.kernels.measure import kernels_table, time_kernels
from specengine.bench.kernels.rows import rows_table
from specengine.bench.options import DRAFTERS, GPU_MODEL, MODEL, Options, parse_numbers
from specengine.bench.peers.registry import split_peers
from specengine.bench.presets.catalog import named
from specengine.bench.presets.preset import Preset
from specengine.bench.presets.side_by_side import side_by_side
from specengine.bench.quality.agreement import rules_table
from specengine.bench.quality.perplexity import perplexities, perplexity_table
from specengine.bench.race.contenders import Contender, split_drafters
from specengine.bench.race.expert_passes import experts_table
from specengine.bench.race.latency import latency_table
from specengine.bench.race.measure import RaceSettings
from specengine.bench.race.prefill import prefill_table
from specengine.bench.race.rule_sweep import rule_contenders, split_rules
from specengine.bench.report.labels import counted
from specengine.bench.report.tables import acceptance_table, peers_table, preset_table, table
from specengine.bench.suite import Plan, run_suite
from specengine.models.lora.adapters import load_adapters
from specengine.tensor_parallel.loading import LoadedModel, load_model, resolve_device


@dataclass(frozen=True)
class Outcome:
    """Holds JSON values of a measurement, and tables of them. quality: whether texts were compared."""

    results: dict[str, Any]
    tables: Sequence[Table]
    quality: bool = False


def measure_kernels(options: Options) -> Outcome:
    """Times every kernel of the device."""
    device = resolve_device(options.device)
    speed = bandwidth(device)
    rows = time_kernels(device, speed)
    results = {"device": device.type, "bytes_per_second": speed, "kernels": rows}
    return Outcome(results, [kernels_table(rows, speed)])


def model_gpu(name: str) -> Outcome:
    """Models cycles on a GPU. Raises ValueError for an unknown one."""
    results = gpu_report.results(gpu_of(name))
    return Outcome(results, gpu_report.tables(results))


def measure_perplexity(options: Options) -> Outcome:
    """Measures the perplexity of the model in every dtype. Raises ValueError for a model without a tokenizer."""
    model = options.model or MODEL
    rows = perplexities(model, device=options.device, dtype=options.dtype)
    title = f"{model}, perplexity of the text in the package"
    return Outcome({"model": model, "perplexity": rows}, [perplexity_table(rows, title)])


def measure_suite(options: Options) -> Outcome:
    """Measures drafters and rules on one loaded model. Raises ValueError for options that do not go together."""
    preset = named(options.preset) if options.preset else None
    on_gpu = preset is not None and resolve_device(options.device).type == "cuda"
    name = options.model or (GPU_MODEL if on_gpu else MODEL)
    model = load_model(name, device=options.device, dtype=options.dtype)
    plan = _plan(options, preset, name, model)
    suite = run_suite(plan, model, options.load_questions(), options.sampling)
    files = ", ".join(file.name for file in options.question_files) if options.questions else "built-in"
    results = {"model": name, "questions_file": files} | suite
    results["preset"] = side_by_side(options.preset, name, results["runs"]) if options.preset else None
    return Outcome(results, [*_tables(results)], plan.quality)


def _plan(options: Options, preset: Preset | None, name: str, model: LoadedModel) -> Plan:
    temperatures: Sequence[float] = preset.temperatures if preset else [0.0]
    batches: Sequence[int] = preset.batches if preset else [1]
    if options.temperature:
        temperatures = parse_numbers("temperature", options.temperature, float)
    if options.batch:
        batches = parse_numbers("batch", options.batch)
    drafters = options.drafters or DRAFTERS
    if preset:
        contenders = preset.contenders(name)
    elif options.rules:
        contenders = rule_contenders(split_rules(options.rules), split_drafters(drafters), model.target)
    else:
        contenders = [Contender(drafter, options.rule or "match") for drafter in split_drafters(drafters)]
    return Plan(
        contenders=contenders,
        settings=RaceSettings(
            temperatures,
            batches,
            options.repetitions,
            load_adapters(options.adapters, model.target) if options.adapters else None,
        ),
        peers=split_peers(options.peers),
        quality=preset.quality if preset else bool(options.rules),
        prefill=options.prefill,
        rows=parse_numbers("rows", options.rows) if options.rows else [],
        prefix=options.prefix,
        memory=options.memory,
    )


def _tables(results: dict[str, Any]) -> Iterator[Table]:
    for temperature in dict.fromkeys(row["temperature"] for row in results["runs"]):
        runs = [row for row in results["runs"] if row["temperature"] == temperature]
        setting = f"{results['dtype']} on {results['device']}, temperature {temperature:g}"
        title = f"{results['model']}, {setting}, {counted(results['questions'], 'question')}"
        if "family" in runs[0]:
            yield rules_table(runs, title)
        else:
            yield table(runs, title)
            if any(row["level_acceptance"] for row in runs):
                yield acceptance_table(runs)
            yield latency_table(runs)
        if any(row["expert_passes"] for row in runs):
            yield experts_table(runs)
        if any(row["speedup_over"] for row in runs):
            yield peers_table(runs)
    if results["preset"]:
        yield preset_table(results["preset"])
    if results["prefill"]:
        yield prefill_table(results["prefill"])
    if results["rows"]:
        yield rows_table(results["rows"], results["one_row_linear"])
