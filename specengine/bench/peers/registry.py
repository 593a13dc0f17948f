"""Peers by name. Each is optional; a peer that cannot be opened is left out with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specengine.bench.peers import hf_transformers, llama_cpp
from specengine.bench.peers.base import Peer, Setup, reason
from specengine.hub.huggingface import resolve_model
from specengine.tensor_parallel.loading import LoadedModel


@dataclass(frozen=True)
class Kind:
    """Holds the function that opens a peer's modes, and the weight formats that it takes."""

    open_modes: Callable[[str, Setup], list[Peer]]
    weights: tuple[str, ...] = ()


KINDS = {
    "transformers": Kind(hf_transformers.open_modes, (*hf_transformers.WEIGHTS, hf_transformers.COMPILED)),
    "llama.cpp": Kind(llama_cpp.open_modes, llama_cpp.WEIGHTS),
}


def split_peers(text: str) -> list[str]:
    """Splits names such as `llama.cpp:Q8_0` at commas. Raises ValueError for an unknown name."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        kind, colon, weights = name.partition(":")
        if kind not in KINDS:
            raise ValueError(f"peers: expected {' or '.join(KINDS)}, got {name!r}")
        if colon and weights not in KINDS[kind].weights:
            raise ValueError(f"peers: {kind} takes {', '.join(KINDS[kind].weights)} after the colon, got {name!r}")
    return names


def open_peers(
    names: Sequence[str], model: LoadedModel, threads: int, scratch: Path
) -> tuple[list[Peer], dict[str, str]]:
    """Returns the modes of all peers that can run a model, and the reason for each other peer."""
    peers: list[Peer] = []
    left_out: dict[str, str] = {}
    for name in names:
        kind, _, weights = name.partition(":")
        try:
            source = resolve_model(model.name)
            setup = Setup(
                name=model.name,
                source=source if isinstance(source, Path) else None,
                config=model.config,
                weights=weights,
                threads=threads,
                device=model.target.device.type,
                eos_token_ids=model.eos_token_ids,
                scratch=scratch,
            )
            peers += KINDS[kind].open_modes(name, setup)
        except Exception as error:  # the loader of another engine may raise any exception
            left_out[name] = reason(error)
    return peers, left_out
