"""llama.cpp through llama-cpp-python: plain generation, and its prompt lookup."""

from __future__ import annotations

import logging
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from specengine.bench.peers.base import Answer, Peer, Setup
from specengine.types import SamplingParams

if TYPE_CHECKING:
    from llama_cpp import Llama

WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q5_K_M", "Q4_1", "Q4_0", "Q4_K_M")
# What its README advises on CPUs; 10, its default, was slower here in every weight format.
LOOKUP_TOKENS = 2
_CONTEXT = 1024  # tokens to begin with


def open_modes(name: str, setup: Setup) -> list[Peer]:
    """Both modes, in the GGUF file's own weight format where none is named."""
    import llama_cpp

    if setup.source is None:
        raise ValueError(f"{setup.name} has no file that another engine could read")
    if not setup.source.is_file():
        raise ValueError(f"llama.cpp reads GGUF files, {setup.source.name} is a folder")
    if setup.device == "cuda" and not llama_cpp.llama_supports_gpu_offload():
        raise ValueError("this build of llama-cpp-python has no GPU support")
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
    file = _requantised(setup, setup.source) if setup.weights else setup.source
    about = {"version": llama_cpp.__version__, "weights": setup.weights or "as in the file", "flash_attn": "on"}
    lookup = {**about, "num_pred_tokens": str(LOOKUP_TOKENS)}
    peers: list[Peer] = [
        LlamaCpp(name, "none", about, setup, file),
        LlamaCpp(f"{name}+prompt_lookup", "prompt_lookup", lookup, setup, file),
    ]
    for peer in peers:
        peer.prepare(_CONTEXT)
    return peers


def _requantised(setup: Setup, source: Path) -> Path:
    """The file in another weight format; quantising what is quantised already loses a little more."""
    import llama_cpp

    out = setup.scratch / f"{setup.weights}.gguf"
    settings = llama_cpp.llama_model_quantize_default_params()
    kind = "ALL" if setup.weights == "F32" else "MOSTLY"
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}_{setup.weights}")
    settings.nthread, settings.allow_requantize = setup.threads, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), settings):
        raise ValueError(f"llama.cpp cannot quantise {source.name} to {setup.weights}")
    return out


class LlamaCpp(Peer):
    """A mode of Llama.generate(). Its context is opened anew, larger, when a conversation outgrows it."""

    def __init__(self, mode: str, drafter: str, about: dict[str, str], setup: Setup, file: Path) -> None:
        super().__init__(mode, drafter, about, setup)
        self.file, self.drafts = file, 0
        self.llama: Llama | None = None

    def prepare(self, positions: int) -> None:
        from llama_cpp import Llama

        positions += LOOKUP_TOKENS + 1
        if self.llama is not None and positions <= self.llama.n_ctx():
            return
        self.llama = None  # the old context's memory goes before the new one's comes
        lookup = self.drafter == "prompt_lookup"
        self.llama = Llama(
            str(self.file),
            n_ctx=max(_CONTEXT, 1 << (positions - 1).bit_length()),
            n_threads=self.setup.threads,
            n_threads_batch=self.setup.threads,
            n_gpu_layers=-1 if self.setup.device == "cuda" else 0,
            flash_attn=True,  # the faster of the two here
            draft_model=self._draft if lookup else None,
            logits_all=lookup,  # it implies that for drafts, but sizes its buffer by what is passed
            verbose=False,
        )

    @cached_property
    def _lookup(self):
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        return LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)

    def _draft(self, ids):
        self.drafts += 1
        return self._lookup(ids)

    def answer(self, ids: list[int], params: SamplingParams, stop: frozenset[int]) -> Answer:
        self.drafts = 0
        assert self.llama is not None  # prepared
        self.llama.reset()  # else it would keep what it computed for the same prompt last time
        self.llama.set_seed(params.seed & 0xFFFFFFFF)
        tokens, deliveries, begin = [], [], time.perf_counter()
        settings = {"temp": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
        for token in self.llama.generate(ids, **settings):
            deliveries.append((time.perf_counter() - begin, 1))
            tokens.append(token)
            if token in stop or len(tokens) == params.max_new_tokens:
                break
        # It drafts between two passes, so there was one pass more.
        return Answer(tokens, deliveries, self.drafts + 1 if self.drafter == "prompt_lookup" else len(tokens))
