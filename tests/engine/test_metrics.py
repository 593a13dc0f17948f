"""What the engine counts is what happened, and Prometheus can read it."""

import threading

import pytest

from specengine import Engine, SamplingParams
from specengine.engine.counts import Counts, Histogram
from specengine.engine.metrics import Metrics
from specengine.engine.prometheus import exposition
from tests.engine.exposition import parsed
from tests.engines import GREEDY, oracle_engine, tiny_engine, tiny_model

PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 90))]


def test_counts_are_those_of_the_outputs():
    engine = oracle_engine(PROMPTS, GREEDY, max_batch_size=2)
    outputs = engine.generate(PROMPTS, GREEDY)
    counts, stats = engine.metrics.snapshot(), [output.stats for output in outputs]
    tokens = sum(len(output.token_ids) for output in outputs)
    assert counts.finished == {"length": 3} and (counts.running, counts.waiting, counts.refused) == (0, 0, 0)
    assert counts.prompt_tokens == sum(map(len, PROMPTS)) and counts.generated_tokens == tokens
    assert counts.request_cycles == sum(each.cycles for each in stats)
    assert counts.request_cycles / 2 <= counts.cycles < counts.request_cycles
    assert counts.tau == pytest.approx(tokens / counts.request_cycles) and counts.tau > 1.5
    firsts = counts.first_token.counts, counts.between_tokens.counts
    assert sum(firsts[0]) == 3 and tokens - counts.request_cycles <= sum(firsts[1]) <= tokens - 3
    assert counts.pages_used == 0 < counts.pages_total


@pytest.mark.parametrize("batch", [1, 2])
def test_a_mixture_shows_how_many_experts_a_layer_read(batch):
    """A row of this model takes 4 of 16 experts."""
    engine = Engine(tiny_model("random:tiny-qwen3-moe"), drafter="none", max_batch_size=batch)
    stats = [output.stats for output in engine.generate([[5, 9, 13], [7]], GREEDY)]
    counts = engine.metrics.snapshot()
    assert f"specengine_experts_per_layer {counts.experts_per_layer}\n" in engine.metrics.prometheus()
    if batch == 1:
        assert [each.experts_per_layer for each in stats] == [4.0, 4.0] and counts.experts_per_layer == 4.0
    else:
        assert 4 < counts.experts_per_layer < 8
        assert counts.experts_per_layer == pytest.approx(stats[0].experts_per_layer)


def test_a_dense_model_shows_no_experts():
    engine = tiny_engine("none")
    assert engine.generate([5, 6], GREEDY).stats.experts_per_layer is None
    assert engine.metrics.snapshot().experts_per_layer is None and "experts" not in engine.metrics.prometheus()


def test_acceptance_by_depth_and_phases_are_those_of_a_single_output():
    engine = oracle_engine(PROMPTS[:1], GREEDY)
    stats = engine.generate(PROMPTS[0], GREEDY).stats
    counts = engine.metrics.snapshot()
    assert counts.acceptance_by_depth == stats.acceptance_by_depth and max(counts.accepted_by_depth) > 1
    for phase in ("draft", "verify", "accept", "compact"):
        assert counts.seconds_by_phase[phase] == pytest.approx(stats.seconds_by_phase[phase])
    assert 0 < counts.seconds_by_phase["host"] <= stats.seconds_by_phase["host"]


def test_streams_count_while_they_run_and_when_they_are_abandoned():
    engine = tiny_engine("none")
    stream = engine.stream([5, 6], GREEDY)
    next(stream), next(stream)
    counts = engine.metrics.snapshot()
    assert (counts.running, counts.generated_tokens, counts.finished) == (1, 2, {})
    assert counts.pages_used > 0
    stream.close()
    counts = engine.metrics.snapshot()
    assert (counts.running, counts.finished, counts.pages_used) == (0, {"cancelled": 1}, 0)


def test_a_stream_collected_while_its_thread_counts_blocks_nothing():
    engine, done = tiny_engine("none"), threading.Event()

    def work() -> None:
        stream = engine.stream([5, 6], GREEDY)
        next(stream)
        with engine.metrics._lock:  # as the garbage collector may find it
            stream.close()
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(30), "the engine hangs"
    assert engine.metrics.snapshot().finished == {"cancelled": 1}


def test_an_error_counts_as_one():
    engine = tiny_engine("none")
    engine.cache.allocate_with_prefix = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, GREEDY)
    counts = engine.metrics.snapshot()
    assert (counts.running, counts.waiting, counts.finished) == (0, 0, {"error": 1, "cancelled": 2})


def test_threads_lose_no_count():
    engine = tiny_engine("none")
    params = SamplingParams(max_new_tokens=30)
    threads = [threading.Thread(target=engine.generate, args=(PROMPTS, params)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = engine.metrics.snapshot()
    assert (counts.running, counts.waiting) == (0, 0)
    assert counts.finished == {"length": 18} and counts.generated_tokens == counts.request_cycles == 18 * 30


def test_a_snapshot_stays_as_it_is():
    engine = tiny_engine("none")
    before = engine.metrics.snapshot()
    engine.generate(PROMPTS, GREEDY)
    assert before == Counts() and engine.metrics.snapshot().generated_tokens == 3 * 48


def test_bounds_of_a_histogram_are_inclusive():
    histogram = Histogram((0.1, 1.0))
    for value, times in ((0.1, 1), (0.10001, 2), (1.0, 1), (7.0, 5)):
        histogram.add(value, times)
    assert histogram.counts == [1, 3, 5] and histogram.sum == pytest.approx(36.30002)


def test_prometheus_reads_what_the_snapshot_says():
    engine = oracle_engine(PROMPTS, GREEDY)
    engine.generate(PROMPTS, GREEDY)
    engine.metrics.refused(2)
    stream = engine.stream([5], GREEDY)
    next(stream)
    counts, families = engine.metrics.snapshot(), parsed(engine.metrics.prometheus())

    def value(name: str, suffix: str = "", **labels: str) -> float:
        return families[f"specengine_{name}"].samples[suffix, tuple(labels.items())]

    assert value("info", model="random:tiny-llama", drafter="oracle", rule="match") == 1
    assert value("requests_running") == 1 and value("requests_waiting") == 0
    assert value("requests_finished_total", reason="length") == 3 and value("requests_refused_total") == 2
    assert value("prompt_tokens_total") == counts.prompt_tokens
    assert value("generated_tokens_total") == counts.generated_tokens
    assert value("cycles_total") == counts.cycles and value("request_cycles_total") == counts.request_cycles
    assert value("tau") == counts.tau
    for depth, (drafted, accepted) in enumerate(zip(counts.drafted_by_depth, counts.accepted_by_depth, strict=True)):
        assert value("drafted_depth_total", depth=str(depth + 1)) == drafted
        assert value("accepted_depth_total", depth=str(depth + 1)) == accepted
    for phase, seconds in counts.seconds_by_phase.items():
        assert value("phase_seconds_total", phase=phase) == seconds
    assert value("first_token_seconds", "_count") == 4 == sum(counts.first_token.counts)
    assert value("between_tokens_seconds", "_sum") == counts.between_tokens.sum
    assert value("cache_pages_used") == counts.pages_used > 0 and value("cache_pages") == counts.pages_total
    assert value("prefix_tokens_total") == counts.prefixes.looked_up > 0
    assert value("prefix_hit_tokens_total") == counts.prefixes.hit and value("prefix_pages") == counts.prefixes.cached


def test_several_engines_are_told_apart_by_labels():
    engines = [tiny_engine("none"), tiny_engine()]
    for number, engine in enumerate(engines):
        engine.generate(PROMPTS[: 1 + number], GREEDY)
    more = ("more", "gauge", "Of another kind.", [("", {}, 7)])
    families = parsed(exposition([({"drafter": str(i)}, e.metrics) for i, e in enumerate(engines)], [more]))
    tokens = families["specengine_generated_tokens_total"].samples
    assert tokens == {("", (("drafter", "0"),)): 48, ("", (("drafter", "1"),)): 96}
    assert families["specengine_first_token_seconds"].samples["_count", (("drafter", "1"),)] == 2
    assert families["specengine_more"].samples == {("", ()): 7}


def test_labels_are_escaped():
    name = 'C:\\models\\"odd"\nname'
    metrics = Metrics(tiny_engine().cache, {"model": name})
    assert list(parsed(metrics.prometheus())["specengine_info"].samples) == [("", (("model", name),))]


@pytest.mark.parametrize(
    "text",
    [
        "specengine_x 1\n",
        "# HELP x Help.\n# TYPE x counter\nx 1\n",
        '# HELP x Help.\n# TYPE x gauge\nx{a="b"c"} 1\n',
        "# HELP x Help.\n# TYPE x gauge\nx 1\nx 1\n",
        "# HELP x Help.\n# TYPE x gauge\ny 1\n",
        "# HELP x Help.\n# TYPE x gauge\nx 1",
        '# HELP x Help.\n# TYPE x histogram\nx_bucket{le="1.0"} 2\nx_bucket{le="+Inf"} 1\nx_sum 1\nx_count 1\n',
    ],
)
def test_the_reader_is_strict(text):
    with pytest.raises((AssertionError, KeyError)):
        parsed(text)
