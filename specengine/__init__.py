"""specengine: lossless speculative decoding for LLaMA, Vicuna and Qwen models."""

from specengine.api import generate
from specengine.build import __version__, build_info
from specengine.engine import Engine
from specengine.hub import ModelFetchError
from specengine.types import CycleTrace, GenerationOutput, GenerationStats, SamplingParams, StreamEvent, TokenLogprob

__all__ = [
    "CycleTrace",
    "Engine",
    "GenerationOutput",
    "GenerationStats",
    "ModelFetchError",
    "SamplingParams",
    "StreamEvent",
    "TokenLogprob",
    "__version__",
    "build_info",
    "generate",
]
