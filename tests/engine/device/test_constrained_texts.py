"""Constrained texts on the device are those of the host: with trees from the host, and with trees drafted there."""

import dataclasses

import pytest

from specengine import Engine, SamplingParams
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from tests.backends import cpu_kernels
from tests.constraints.vocabulary import CONSTRAINTS, ENDS, TOKENIZER, talking_model
from tests.engine.device.prompts import LOOKUP
from tests.engines import Oracle, ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing

PROMPTS = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("name a thing", "yes or no?", "the age", "x")]


@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_a_constrained_text_on_the_device_is_that_of_the_host(cuda_backend, temperature):
    params = [
        SamplingParams(max_new_tokens=24, temperature=temperature, seed=number, **given)
        for number, given in enumerate(({"regex": CONSTRAINTS[1]["regex"]}, {}, {"choices": CONSTRAINTS[2]["choices"]}))
    ]
    params.append(dataclasses.replace(params[1], min_tokens=5, logit_bias=dict.fromkeys(ENDS, 9.0)))
    with cpu_kernels():
        plain = Engine(talking_model(), drafter="none").generate(PROMPTS, params)
    ops = cuda_ops(cuda_backend.device, strict=True)
    model = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops)
    model = dataclasses.replace(model, tokenizer=TOKENIZER, eos_token_ids=ENDS)
    assert len(plain[3].token_ids) == 6
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    for drafter in (LOOKUP, Oracle(answers, 320, nodes=6)):
        outputs = Engine(model, drafter=drafter, max_batch_size=2).generate(PROMPTS, params)
        assert ids(outputs) == ids(plain)
        assert [output.finish_reason for output in outputs] == [output.finish_reason for output in plain]
