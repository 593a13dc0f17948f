"""Engines with captured cycles on the stand-in device."""

import dataclasses

from specengine import Engine
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import LoadedModel, load_model
from tests.cuda_standin.device import CUDA


def model_on_the_standin(name: str = "tiny-llama") -> LoadedModel:
    """A tiny float32 model; products are not measured, because no time passes on the stand-in."""
    ops = dataclasses.replace(cuda_ops(CUDA, strict=True), tune=None)
    model = load_model(f"random:{name}", device="cuda", dtype="float32", ops=ops)
    return dataclasses.replace(model, eos_token_ids=frozenset())


def captured_engine(model: LoadedModel, drafter: str, **options) -> Engine:
    """An engine whose cycles are captured, which is checked."""
    engine = Engine(model, drafter=drafter, **options)
    assert engine.core.runner.graphs._graphs.keys() == engine.core.runner.graphs.batches.keys()
    return engine
