import dataclasses
import inspect
import itertools
import json

import pytest

from specengine import SamplingParams, generate
from tests.engines import tiny_engine


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-9),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", None),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {3: float("-inf")}),
        ("logit_bias", {-3: 1.0}),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [7]),
        ("stop", [b"a"]),
        ("stop", ["ok", "a\ud83d"]),
        ("stop", 123),
        ("stop", {"a": 1}),
        ("stop", "\udcff"),
        ("ignore_eos", 1),
        ("stop_token_ids", "2"),
        ("stop_token_ids", 2),
        ("stop_token_ids", [2, -1]),
        ("stop_token_ids", [2.0]),
        ("stop_token_ids", [True]),
        ("min_tokens", -1),
        ("min_tokens", 129),  # of 128 in all
        ("logprobs", -1),
        ("n", 0),
        ("trace", "yes"),
        ("json_schema", True),
        ("json_schema", "true"),
        ("json_schema", "{"),
        ("json_schema", []),
        ("json_schema", {"maximum": float("inf")}),
        ("json_schema", {"const": {1, 2}}),
        ("json_schema", {"const": "a\ud83d"}),
        ("regex", ""),
        ("regex", 3),
        ("regex", "\udcff"),
        ("grammar", b"start: x"),
        ("grammar", ""),
        ("choices", "yes"),
        ("choices", []),
        ("choices", ["yes", ""]),
        ("choices", {"yes": 1}),
    ],
)
def test_out_of_range_parameters_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}"):
        SamplingParams(**{name: value})


def test_unknown_parameters_are_refused():
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)


def test_params_are_frozen_and_comparable():
    params = SamplingParams(stop="x")
    assert params.stop == ("x",) and params == SamplingParams(stop=["x"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3


def test_a_text_has_one_constraint_which_nobody_can_change_any_more():
    schema = {"properties": {"é": {"type": "integer"}}}
    params = SamplingParams(json_schema=schema)
    schema["properties"].clear()
    assert params == SamplingParams(json_schema='{"properties": {"é": {"type": "integer"}}}')
    assert (params.constraint, SamplingParams().constraint) == ("json_schema", None)
    assert SamplingParams(choices=["a", "b"]).choices == ("a", "b")
    for one, other in itertools.pairwise(
        ({"json_schema": {}}, {"regex": "a"}, {"grammar": "start: x"}, {"choices": ["a"]})
    ):
        with pytest.raises(ValueError, match=f"^{next(iter(other))}: .*{next(iter(one))} is given too"):
            SamplingParams(**one, **other)


def test_an_output_is_plain_json():
    output = tiny_engine().generate([3, 4, 5], SamplingParams(max_new_tokens=5, logprobs=2, trace=True))
    data = json.loads(json.dumps(output.to_dict()))
    assert set(data) == {
        "text",
        "token_ids",
        "prompt_token_ids",
        "finish_reason",
        "logprobs",
        "stats",
        "trace",
    }
    assert data["trace"][0]["parents"][0] == -1
    assert data["token_ids"] == output.token_ids


def test_numpy_numbers_are_numbers():
    import numpy as np

    params = SamplingParams(
        max_new_tokens=np.int64(3), temperature=np.float32(0.5), logit_bias={np.int64(1): np.float64(1)}
    )
    assert params == SamplingParams(max_new_tokens=3, temperature=0.5, logit_bias={1: 1.0})


def test_generate_takes_every_sampling_parameter_with_its_default():
    taken = inspect.signature(generate).parameters
    assert {each.name: each.default for each in dataclasses.fields(SamplingParams)} == {
        name: taken[name].default
        for name in taken
        if name not in ("prompts", "model", "drafter", "rule", "device", "dtype", "adapters")
    }


def test_parameters_among_other_arguments_are_found_and_the_others_left():
    found = SamplingParams.among({"prompt": "x", "top_k": 3, "seed": 4})
    assert found == SamplingParams(top_k=3, seed=4)
