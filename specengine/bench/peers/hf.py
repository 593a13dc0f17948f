"""transformers: plain generation, its prompt lookup, and compiled plain generation."""

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
COMPILED = "compiled"  # a static cache, and on CUDA torch.compile: what its documentation advises for speed
CACHE_STEP = 1024  # tokens; another size of cache is compiled anew
LOOKUP_TOKENS = 10  # the number its documentation uses


def open_modes(name: str, setup: Setup) -> list[Peer]:
    """The modes on one copy of the weights: float32 where no format is named, bfloat16 for compiled CUDA."""
    import transformers

    # Its advice and progress bars would land between our lines.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(setup.threads)
    compiled = setup.weights == COMPILED
    weights = WEIGHTS[compiled and setup.device == "cuda"] if compiled or not setup.weights else setup.weights
    model = _load(setup, getattr(torch, weights)).to(setup.device).eval()
    model.generation_config = transformers.GenerationConfig()  # the checkpoint's sampling settings are not ours
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
    with redirect_stderr(StringIO()):  # its reader of GGUF files has a bar that no setting turns off
        return transformers.AutoModelForCausalLM.from_pretrained(
            setup.source.parent if file else setup.source,
            dtype=dtype,
            local_files_only=True,
            **({"gguf_file": setup.source.name} if file else {}),
        )


def _config(config: ModelConfig):
    """Of the same shape; how positions are scaled does not change the speed."""
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
    """A mode of transformers' generate()."""

    def __init__(self, mode: str, drafter: str, about: dict[str, str], setup: Setup, model: Any) -> None:
        super().__init__(mode, drafter, about, setup)
        self.model = model
        self.options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if drafter == "prompt_lookup" else {}

    def answer(self, ids: list[int], params: SamplingParams, stop: frozenset[int]) -> Answer:
        prompt = torch.tensor([ids], device=self.model.device)
        watch = _Watch()
        torch.manual_seed(params.seed)
        found = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=params.max_new_tokens,
            eos_token_id=sorted(stop) or None,
            pad_token_id=0,
            streamer=watch,
            **_sampling(params),
            **self.options,
        )
        # Its deferred stop check may append a token past the end; the first end counts.
        tokens = found[0, len(ids) :].tolist()
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
        return Answer(tokens[:end], watch.deliveries, len(watch.deliveries))


class Compiled(Transformers):
    """Plain generation over a cache that keeps its size, which lets transformers compile a step on CUDA."""

    room = 0  # tokens of the cache
    _cache: StaticCache

    def prepare(self, positions: int) -> None:
        from transformers import StaticCache

        if positions >= self.room:
            self.room = -(-(positions + 1) // CACHE_STEP) * CACHE_STEP
            self._cache = StaticCache(config=self.model.config, max_cache_len=self.room)
            self.options = {"past_key_values": self._cache}
            self.answer([0], SamplingParams(max_new_tokens=8), frozenset())  # compiles, and records its graphs

    def answer(self, ids: list[int], params: SamplingParams, stop: frozenset[int]) -> Answer:
        self._cache.reset()
        return super().answer(ids, params, stop)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    if params.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}


class _Watch:
    """A streamer: generate() puts the prompt, then the new tokens of every pass."""

    def __init__(self) -> None:
        self._begin, self._prompted = time.perf_counter(), False
        self.deliveries: list[tuple[float, int]] = []

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompted:
            self.deliveries.append((time.perf_counter() - self._begin, tokens.numel()))
        self._prompted = True

    def end(self) -> None:
        pass
