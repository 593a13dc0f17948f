"""The table of the experts that passes read."""

from dataclasses import replace

import pytest
from rich.console import Console

from specengine import Engine
from specengine.bench.race.expert_passes import expert_passes, experts_table
from tests.engines import GREEDY, tiny_model

PARAMS = replace(GREEDY, max_new_tokens=40, ignore_eos=True)


def passes_of(model, drafter="prompt_lookup"):
    engine = Engine(tiny_model(model), drafter=drafter)
    cycles = engine.generate([5, 6, 7] * 12, PARAMS).stats.cycles
    return expert_passes(engine), cycles


def test_the_passes_of_a_mixture_are_those_of_its_cycles_and_fill_a_table():
    passes, cycles = passes_of("random:tiny-qwen3-moe")
    assert sum(each["passes"] for each in passes) <= cycles  # a rest is not measured
    assert all(4 <= each["experts_per_layer"] <= min(16, 4 * each["rows"]) for each in passes)
    assert all(each["predicted_ms"] > 0 and each["measured_ms"] > 0 for each in passes) and len(passes) > 1
    row = {"drafter": "prompt_lookup", "rule": "match", "label": "prompt_lookup", "expert_passes": passes}
    console = Console(width=200, file=None)
    with console.capture() as shown:
        console.print(experts_table([{**row, "batch": 1}, {**row, "batch": 2}]))
    lines = [line for line in shown.get().splitlines() if line.startswith("│")]
    assert len(lines) == len(passes)
    assert [line.split()[3] for line in lines] == [str(each["rows"]) for each in passes]


@pytest.mark.parametrize(
    ("model", "drafter"), [("random:tiny-llama", "prompt_lookup"), ("random:tiny-qwen3-moe", "none")]
)
def test_a_dense_model_and_plain_decoding_have_none(model, drafter):
    assert passes_of(model, drafter)[0] == []
