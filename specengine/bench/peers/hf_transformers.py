"""Peer transformers: plain generation, its prompt lookup, and compiled plain generation."""

from __future__ import annotations

import time
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch

from specengine.bench.peers.base import Answer, Peer, Setup
from specengine.models.config import ModelConfig
from specengine.types import SamplingParams

if TYPE_CHECKING:
    from transformers import StaticCache

WEIGHTS = ("float32", "bfloat16", "float16")
COMPILED = "compiled"  # a static cache, and torch.compile on CUDA, as its documentation recommends for speed
CACHE_STEP = 1024  # tokens; each size of cache is compiled again
LOOKUP_TOKENS = 10  # the number its documentation uses


def open_modes(name: str, setup: Setup) -> list[Peer]:
    """Opens the modes on one copy of the weights. The default is float32, and bfloat16 for compiled CUDA."""
    import transformers

    # Its warnings and progress bars would mix with the output of the benchmark.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(setup.threads)
    compiled = setup.weights == COMPILED
    default = "bfloat16" if compiled and setup.device == "cuda" else "float32"
    weights = default if compiled or not setup.weights else setup.weights
    model = _load(setup, getattr(torch, weights)).to(setup.device).eval()
    model.generation_config = transformers.GenerationConfig()  # ignores the checkpoint's sampling settings
    about = {"version": transformers.__version__, "weights": weights if setup.source else f"{weights}, its own random"}
    if compiled:
        return [Compiled(name, "none", {**about, "cache": "static"}, setup, model)]
    lookup = {**about, "prompt_lookup_num_tokens": str(LOOKUP_TOKENS)}
    return [
        Transformers(name, "none", about, setup, model),
        Transformers(f"{name}+prompt_lookup", "prompt_lookup", lookup, setup, model),
    ]


def _load(setup: Setup, dtype: torch.dtype) -> Any:
    import transformers

    if setup.source is None:
        with torch.device(setup.device):
            return transformers.AutoModelForCausalLM.from_config(_config(setup.config), dtype=dtype)
    file = setup.source.is_file()
    with redirect_stderr(StringIO()):  # no setting turns off the progress bar of its GGUF reader
        return transformers.AutoModelForCausalLM.from_pretrained(
            setup.source.parent if file else setup.source,
            dtype=dtype,
            local_files_only=True,
            **({"gguf_file": setup.source.name} if file else {}),
        )


def _config(config: ModelConfig):
    """Returns a configuration of the same shape, without the scaling of positions, which does not change the speed."""
    import transformers

    return transformers.AutoConfig.for_model(
        config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
    )


class Transformers(Peer):
    """Runs generate() of transformers."""

    def __init__(self, mode: str, drafter: str, about: dict[str, str], setup: Setup, model: Any) -> None:
        super().__init__(mode, drafter, about, setup)
        self.model = model
        self.options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if drafter == "prompt_lookup" else {}

    def answer(self, ids: list[int], params: SamplingParams, stop: frozenset[int]) -> Answer:
        prompt = torch.tensor([ids], device=self.model.device)
        streamer = _DeliveryTimer()
        torch.manual_seed(params.seed)
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=params.max_new_tokens,
            eos_token_id=sorted(stop) or None,
            pad_token_id=0,
            streamer=streamer,
            **_sampling(params),
            **self.options,
        )
        # Its deferred stop check may add a token after the end.
        tokens = output[0, len(ids) :].tolist()
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
        return Answer(tokens[:end], streamer.deliveries, len(streamer.deliveries))


class Compiled(Transformers):
    """Runs plain generation with a cache of fixed size, so that transformers compiles a step on CUDA."""

    room = 0  # tokens of the cache
    _cache: StaticCache

    def prepare(self, positions: int) -> None:
        from transformers import StaticCache

        if positions >= self.room:
            self.room = -(-(positions + 1) // CACHE_STEP) * CACHE_STEP
            self._cache = StaticCache(config=self.model.config, max_cache_len=self.room)
            self.options = {"past_key_values": self._cache}
            self.answer([0], SamplingParams(max_new_tokens=8), frozenset())  # compiles and records CUDA graphs

    def answer(self, ids: list[int], params: SamplingParams, stop: frozenset[int]) -> Answer:
        self._cache.reset()
        return super().answer(ids, params, stop)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    if params.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}


class _DeliveryTimer:
    """Records when tokens arrive. generate() puts the prompt first, then the new tokens of every pass."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._prompted = False
        self.deliveries: list[tuple[float, int]] = []

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompted:
            self.deliveries.append((time.perf_counter() - self._begin, tokens.numel()))
        self._prompted = True

    def end(self) -> None:
        pass
