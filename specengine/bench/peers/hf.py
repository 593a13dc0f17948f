"""transformers: plain generation, and its prompt lookup."""

from __future__ import annotations

import time
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch

from specengine.bench.peers.base import Answer, Peer, Setup
from specengine.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = ("float32", "bfloat16", "float16")
LOOKUP_TOKENS = 10  # the number its documentation uses


def open_modes(name: str, setup: Setup) -> list[Peer]:
    """Both modes on one copy of the weights (float32 where no format is named)."""
    import transformers

    # Its advice and progress bars would land between our lines.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(setup.threads)
    file = setup.source.is_file()
    weights = setup.weights or WEIGHTS[0]
    with redirect_stderr(StringIO()):  # its reader of GGUF files has a bar that no setting turns off
        model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.source.parent if file else setup.source,
            dtype=getattr(torch, weights),
            local_files_only=True,
            **({"gguf_file": setup.source.name} if file else {}),
        )
    model = model.to(setup.device).eval()
    model.generation_config = transformers.GenerationConfig()  # the checkpoint's sampling settings are not ours
    about = {"version": transformers.__version__, "weights": weights}
    lookup = {**about, "prompt_lookup_num_tokens": str(LOOKUP_TOKENS)}
    return [
        Transformers(name, "none", about, setup, model),
        Transformers(f"{name}+prompt_lookup", "prompt_lookup", lookup, setup, model),
    ]


class Transformers(Peer):
    """A mode of transformers' generate()."""

    def __init__(self, mode: str, drafter: str, about: dict[str, str], setup: Setup, model: PreTrainedModel) -> None:
        super().__init__(mode, drafter, about, setup)
        self.model = model

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
            **({"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self.drafter == "prompt_lookup" else {}),
        )
        # Its deferred stop check may append a token past the end; the first end counts.
        tokens = found[0, len(ids) :].tolist()
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
        return Answer(tokens[:end], watch.first_token_seconds, watch.cycles)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    if params.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}


class _Watch:
    """A streamer: generate() puts the prompt, then the new tokens of every pass."""

    def __init__(self) -> None:
        self.begin, self.first_token_seconds, self.puts = time.perf_counter(), 0.0, 0

    def put(self, tokens: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_token_seconds = time.perf_counter() - self.begin

    def end(self) -> None:
        pass

    @property
    def cycles(self) -> int:
        return self.puts - 1
