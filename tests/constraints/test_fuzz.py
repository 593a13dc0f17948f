"""A slice of the fuzz runner, and its judgement of texts that are wrong."""

import random

import pytest

from specengine import SamplingParams
from specengine.tensor_parallel.loading import load_model
from tests.constraints.fuzz import DRAFTERS, Fuzzer
from tests.constraints.random_constraints import fixed_schemas, problem, random_constraint


@pytest.mark.model
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
def test_random_constrained_requests_are_valid_and_equal_plain_ones(smollm2_path, seed):
    drafters = ("prompt_lookup",) if seed == 0 else DRAFTERS
    fuzzer = Fuzzer(load_model(smollm2_path, device="cpu"), seed, drafters)
    fuzzer.run(8 if seed == 0 else 60)
    tallies = fuzzer.tallies.values()
    assert not [failure for tally in tallies for failure in tally.failures]
    assert sum(tally.finished for tally in tallies) > sum(tally.requests for tally in tallies) / 2


def test_the_judge_knows_wrong_texts():
    schema = SamplingParams(json_schema={"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}})
    assert problem('{"a": 3}', schema) is None
    assert all(problem(text, schema) for text in ('{"a": 4}', '{"a": "3"}', '{"a": 3', "[]"))
    assert problem("aa", SamplingParams(regex="a")) and not problem("a", SamplingParams(regex="a"))
    assert problem("c", SamplingParams(choices=["a", "b"])) and not problem("b", SamplingParams(choices=["a", "b"]))


def test_drawn_constraints_are_of_every_kind():
    rng = random.Random(2)
    kinds = {next(iter(random_constraint(rng)[1])) for _ in range(60)}
    assert kinds == {"json_schema", "regex", "choices"} and len(fixed_schemas()) == 60
