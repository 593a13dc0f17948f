"""Other engines in the same race; each is optional, and what cannot be opened is left out with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specengine.bench.peers import hf, llama
from specengine.bench.peers.base import Peer, Setup, reason
from specengine.hub.huggingface import resolve_model
from specengine.tensor_parallel.loading import LoadedModel


@dataclass(frozen=True)
class Kind:
    """An engine: how its modes are opened, and the weight formats it may be asked for."""

    open_modes: Callable[[str, Setup], list[Peer]]
    weights: tuple[str, ...] = ()


KINDS = {
    "transformers": Kind(hf.open_modes, (*hf.WEIGHTS, hf.COMPILED)),
    "llama.cpp": Kind(llama.open_modes, llama.WEIGHTS),
}


def split_peers(text: str) -> list[str]:
    """Names such as `llama.cpp:Q8_0`, separated by commas. Raises ValueError for one nobody knows."""
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
    """The modes of all peers that can run this model, and for the others why they cannot."""
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
        except Exception as error:  # a foreign loader raises anything
            left_out[name] = reason(error)
    return peers, left_out
