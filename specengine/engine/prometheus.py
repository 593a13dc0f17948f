"""Counters in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Protocol

from specengine.engine.counts import Counts, Histogram

Labels = Mapping[str, object]
Sample = tuple[str, Labels, float]  # suffix of the name, labels, value
Family = tuple[str, str, str, list[Sample]]  # name, type, help, samples


class Counter(Protocol):
    """What has counters.  labels: of specengine_info."""

    @property
    def labels(self) -> Labels: ...

    def snapshot(self) -> Counts: ...


def exposition(engines: Iterable[tuple[Labels, Counter]], others: Iterable[Family] = ()) -> str:
    """Returns the text of several engines, told apart by labels, and of other families."""
    merged: dict[str, Family] = {}
    for labels, engine in engines:
        for name, kind, help_text, samples in families(engine.snapshot(), engine.labels):
            merged.setdefault(name, (name, kind, help_text, []))[3].extend(
                (suffix, {**own, **labels}, value) for suffix, own, value in samples
            )
    return "".join(_text_of(*family) for family in (*merged.values(), *others))


def families(counts: Counts, info: Labels) -> Iterable[Family]:
    """Yields the metric families of one engine.  info: labels of specengine_info."""

    def one(value: float) -> list[Sample]:
        return [("", {}, value)]

    def by(label: str, values: Iterable[tuple[object, float]]) -> list[Sample]:
        return [("", {label: key}, value) for key, value in values]

    yield "info", "gauge", "Model, drafter and rule of the engine.", [("", info, 1)]
    yield "requests_running", "gauge", "Requests that prefill or decode.", one(counts.running)
    yield "requests_waiting", "gauge", "Requests in the queue.", one(counts.waiting)
    yield (
        "requests_finished_total",
        "counter",
        "Ended requests, by reason.",
        by("reason", sorted(counts.finished.items())),
    )
    yield "requests_refused_total", "counter", "Requests that found the queue full.", one(counts.refused)
    yield "prompt_tokens_total", "counter", "Tokens of prompts.", one(counts.prompt_tokens)
    yield "generated_tokens_total", "counter", "Tokens committed.", one(counts.generated_tokens)
    yield "cycles_total", "counter", "Cycles of the batch.", one(counts.cycles)
    yield "request_cycles_total", "counter", "Cycles, once for each request in them.", one(counts.request_cycles)
    yield "tau", "gauge", "Mean committed tokens per request and cycle.", one(counts.tau)
    if (experts := counts.experts_per_layer) is not None:
        yield "experts_per_layer", "gauge", "Mean experts that a layer reads in the pass of a cycle.", one(experts)
    deep = "Cycles of ended requests that {} depth, or deeper."
    for verb, column in (("drafted", counts.drafted_by_depth), ("accepted", counts.accepted_by_depth)):
        samples = by("depth", enumerate(column, start=1))
        yield f"{verb}_depth_total", "counter", deep.format(f"{verb} a node of this"), samples
    yield (
        "phase_seconds_total",
        "counter",
        "Time of cycles, by phase.",
        by("phase", counts.seconds_by_phase.items()),
    )
    yield "first_token_seconds", "histogram", "From request to first token.", _buckets(counts.first_token)
    yield "between_tokens_seconds", "histogram", "Between two tokens.", _buckets(counts.between_tokens)
    yield "cache_pages_used", "gauge", "Pages of the key/value cache in use.", one(counts.pages_used)
    yield "cache_pages", "gauge", "Pages of the key/value cache that may take memory.", one(counts.pages_total)
    prefixes = counts.prefixes
    yield "prefix_tokens_total", "counter", "Prompt tokens looked up in the prefix cache.", one(prefixes.looked_up)
    yield "prefix_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache.", one(prefixes.hit)
    yield "prefix_evicted_pages_total", "counter", "Pages evicted from the prefix cache.", one(prefixes.evicted)
    yield "prefix_pages", "gauge", "Pages of the prefix cache, in use or not.", one(prefixes.cached)


def _buckets(histogram: Histogram) -> list[Sample]:
    below = list(accumulate(histogram.counts))
    bounds = (*histogram.bounds, "+Inf")
    samples = [("_bucket", {"le": bound}, count) for bound, count in zip(bounds, below, strict=True)]
    return [*samples, ("_sum", {}, histogram.sum), ("_count", {}, below[-1])]


def _text_of(name: str, kind: str, help_text: str, samples: list[Sample]) -> str:
    name = f"specengine_{name}"
    lines = [f"# HELP {name} {_escaped(help_text)}", f"# TYPE {name} {kind}"]
    for suffix, labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(str(of), quote=True)}"' for key, of in labels.items())
        lines.append(f"{name}{suffix}{'{' + inside + '}' if inside else ''} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text
