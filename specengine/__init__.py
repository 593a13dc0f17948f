"""specengine: lossless speculative decoding for LLaMA, Vicuna and Qwen models."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specengine.api import generate
    from specengine.async_engine import AsyncEngine
    from specengine.build import __version__, build_info
    from specengine.embedded_models import ModelFetchError
    from specengine.engine import Engine
    from specengine.metrics import Counts, Metrics
    from specengine.parallel.group import RankFailed
    from specengine.types import (
        CycleTrace,
        GenerationOutput,
        GenerationStats,
        SamplingParams,
        SourceStats,
        StreamEvent,
        TokenLogprob,
    )
    from specengine.worker import Closed, GenerationFailed, Overloaded

logging.getLogger("specengine").addHandler(logging.NullHandler())

# Loaded at first use: torch takes seconds to import, and `specengine --help` needs none of it.
_HOMES = {
    "generate": "api",
    "__version__": "build",
    "build_info": "build",
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "Counts": "metrics",
    "Metrics": "metrics",
    "ModelFetchError": "embedded_models",
    "RankFailed": "parallel.group",
    "CycleTrace": "types",
    "GenerationOutput": "types",
    "GenerationStats": "types",
    "SamplingParams": "types",
    "SourceStats": "types",
    "StreamEvent": "types",
    "TokenLogprob": "types",
    "Closed": "worker",
    "GenerationFailed": "worker",
    "Overloaded": "worker",
}

__all__ = [
    "AsyncEngine",
    "Closed",
    "Counts",
    "CycleTrace",
    "Engine",
    "GenerationFailed",
    "GenerationOutput",
    "GenerationStats",
    "Metrics",
    "ModelFetchError",
    "Overloaded",
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
    value = getattr(importlib.import_module(f"specengine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
