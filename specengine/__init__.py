"""specengine: lossless speculative decoding for LLaMA, Vicuna and Qwen models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specengine.api import generate
    from specengine.build import __version__, build_info
    from specengine.embedded_models import ModelFetchError
    from specengine.engine import Engine
    from specengine.types import (
        CycleTrace,
        GenerationOutput,
        GenerationStats,
        SamplingParams,
        SourceStats,
        StreamEvent,
        TokenLogprob,
    )

# Loaded at first use: torch takes seconds to import, and `specengine --help` needs none of it.
_HOMES = {
    "generate": "api",
    "__version__": "build",
    "build_info": "build",
    "Engine": "engine",
    "ModelFetchError": "embedded_models",
    "CycleTrace": "types",
    "GenerationOutput": "types",
    "GenerationStats": "types",
    "SamplingParams": "types",
    "SourceStats": "types",
    "StreamEvent": "types",
    "TokenLogprob": "types",
}

__all__ = [
    "CycleTrace",
    "Engine",
    "GenerationOutput",
    "GenerationStats",
    "ModelFetchError",
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
