"""specengine: lossless speculative decoding for LLaMA, Vicuna, Mistral and Qwen models."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from specengine.utils.collection import collection_paused

if TYPE_CHECKING:
    from specengine.api import generate
    from specengine.engine.async_engine import AsyncEngine
    from specengine.engine.counts import Counts
    from specengine.engine.engine import Engine
    from specengine.engine.metrics import Metrics
    from specengine.types import (
        Closed,
        ConstraintFailed,
        CycleTrace,
        GenerationFailed,
        GenerationOutput,
        GenerationStats,
        ModelFetchError,
        Overloaded,
        PromptTooLong,
        RankFailed,
        SamplingParams,
        SourceStats,
        StreamEvent,
        TokenLogprob,
    )
    from specengine.utils.build_info import __version__, build_info

logging.getLogger("specengine").addHandler(logging.NullHandler())

# Imported at first use: torch takes seconds to import, and `specengine --help` does without it.
_HOMES = {
    "generate": "api",
    "__version__": "utils.build_info",
    "build_info": "utils.build_info",
    "AsyncEngine": "engine.async_engine",
    "Engine": "engine.engine",
    "Counts": "engine.counts",
    "Metrics": "engine.metrics",
    "ModelFetchError": "types",
    "RankFailed": "types",
    "CycleTrace": "types",
    "GenerationOutput": "types",
    "GenerationStats": "types",
    "SamplingParams": "types",
    "SourceStats": "types",
    "StreamEvent": "types",
    "TokenLogprob": "types",
    "Closed": "types",
    "ConstraintFailed": "types",
    "GenerationFailed": "types",
    "Overloaded": "types",
    "PromptTooLong": "types",
}

__all__ = [
    "AsyncEngine",
    "Closed",
    "ConstraintFailed",
    "Counts",
    "CycleTrace",
    "Engine",
    "GenerationFailed",
    "GenerationOutput",
    "GenerationStats",
    "Metrics",
    "ModelFetchError",
    "Overloaded",
    "PromptTooLong",
    "RankFailed",
    "SamplingParams",
    "SourceStats",
    "StreamEvent",
    "TokenLogprob",
    "__version__",
    "build_info",
    "generate",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'specengine' has no attribute {name!r}")
    with collection_paused():
        value = getattr(importlib.import_module(f"specengine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
