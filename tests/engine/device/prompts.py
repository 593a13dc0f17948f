"""Prompts and parameters of device tests, and what the CPU says to them."""

import dataclasses

from specengine import Engine
from specengine.tensor_parallel.loading import load_model
from tests import engines
from tests.backends import cpu_kernels

PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 70)), [11, 12, 11, 12, 11, 12, 11]]
GREEDY, SAMPLED, SHAPED = (
    dataclasses.replace(each, max_new_tokens=8) for each in (engines.GREEDY, engines.SAMPLED, engines.SHAPED)
)
LOOKUP = "prompt_lookup,nodes=6,adaptive=false"


def on_the_cpu(params, name="tiny-llama", prompts=PROMPTS, **options):
    """What the CPU says to the prompts, drafting nothing."""
    with cpu_kernels():
        model = load_model(f"random:{name}", device="cpu", dtype="float32")
        model = dataclasses.replace(model, eos_token_ids=options.pop("eos", frozenset()))
        return Engine(model, **{"drafter": "none"} | options).generate(prompts, params)
