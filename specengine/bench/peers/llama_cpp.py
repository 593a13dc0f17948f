"""Peer llama.cpp through llama-cpp-python: plain generation, and its prompt lookup."""

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
# Its README recommends 2 on CPUs. The default of 10 was slower in every weight format.
LOOKUP_TOKENS = 2
_CONTEXT = 1024  # tokens of the first context


def open_modes(name: str, setup: Setup) -> list[Peer]:
    """Opens both modes. The default weight format is that of the GGUF file."""
    import llama_cpp

    if setup.source is None:
        raise ValueError(f"{setup.name} has no file that another engine can read")
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
    """Writes the file in another weight format. Quantising quantised weights again loses some accuracy."""
    import llama_cpp

    out = setup.scratch / f"{setup.weights}.gguf"
    settings = llama_cpp.llama_model_quantize_default_params()
    kind = "ALL" if setup.weights == "F32" else "MOSTLY"
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}_{setup.weights}")
    settings.nthread = setup.threads
    settings.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), settings):
        raise ValueError(f"llama.cpp cannot quantise {source.name} to {setup.weights}")
    return out


class LlamaCpp(Peer):
    """Runs Llama.generate(). A conversation that outgrows its context opens a larger one."""

    def __init__(self, mode: str, drafter: str, about: dict[str, str], setup: Setup, file: Path) -> None:
        super().__init__(mode, drafter, about, setup)
        self.file = file
        self.drafts = 0
        self.llama: Llama | None = None

    def prepare(self, positions: int) -> None:
        from llama_cpp import Llama

        positions += LOOKUP_TOKENS + 1
        if self.llama is not None and positions <= self.llama.n_ctx():
            return
        self.llama = None  # free the old context before the new one is allocated
        lookup = self.drafter == "prompt_lookup"
        self.llama = Llama(
            str(self.file),
            n_ctx=max(_CONTEXT, 1 << (positions - 1).bit_length()),
            n_threads=self.setup.threads,
            n_threads_batch=self.setup.threads,
            n_gpu_layers=-1 if self.setup.device == "cuda" else 0,
            flash_attn=True,  # faster than without
            draft_model=self._draft if lookup else None,
            logits_all=lookup,  # drafts need all logits, and this argument sizes the buffer
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
        self.llama.reset()  # or it would reuse the cache of the same prompt
        self.llama.set_seed(params.seed & 0xFFFFFFFF)
        tokens: list[int] = []
        deliveries: list[tuple[float, int]] = []
        begin = time.perf_counter()
        settings = {"temp": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
        for token in self.llama.generate(ids, **settings):
            deliveries.append((time.perf_counter() - begin, 1))
            tokens.append(token)
            if token in stop or len(tokens) == params.max_new_tokens:
                break
        # It drafts between two passes, so there is one pass more than drafts.
        return Answer(tokens, deliveries, self.drafts + 1 if self.drafter == "prompt_lookup" else len(tokens))
