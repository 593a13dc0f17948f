"""Stores the target's states of dialogues between epochs: a file of float16 rows per dialogue, made on first use.

float16 loses less than a float16 cache or an 8-bit weight has lost before; values beyond its range are clamped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specengine.train.data.dialogue_files import Dialogue
from specengine.train.data.target_states import TargetStates
from specengine.utils.atomic_file import atomic_file

T = TypeVar("T", torch.Tensor, None)

# field of TargetStates -> tensor in the files; stores on disk have these names
STORED_NAMES = {"greedy": "greedy", "last": "last", "at_layers": "tapped", "keys": "keys", "values": "values"}


def half(x: T) -> T:
    """Converts floats to float16 on the CPU; integers keep their type."""
    if x is None or not x.is_floating_point():
        return x if x is None else x.cpu()
    limit = torch.finfo(torch.float16).max
    return x.clamp(-limit, limit).to("cpu", torch.float16)


class StateStore:
    """Computes states once and stores them.

    compute: returns the states of a dialogue's tokens.  folder: of the files; None stores in memory.  about: the source
    of the states, which a stored file must share.
    """

    def __init__(
        self, compute: Callable[[Sequence[int]], TargetStates], folder: Path | None, about: dict[str, str]
    ) -> None:
        self._compute = compute
        self._folder = folder
        self._about = about
        self._memory: dict[int, TargetStates] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def states(self, number: int, dialogue: Dialogue) -> TargetStates:
        """Returns the states of the dialogue of this number. Raises ValueError for a file of other states."""
        if self._folder is None:
            if number not in self._memory:
                self._memory[number] = _halves(self._compute(dialogue.tokens))
            return self._memory[number]
        path = self._folder / f"states-{number:07d}.safetensors"
        expected = self._metadata(dialogue)
        if not path.exists():
            self._write(path, self._compute(dialogue.tokens), expected)
        try:
            with safe_open(path, "pt") as file:
                about = dict(file.metadata() or {})
                if about != expected:
                    raise ValueError(f"data: {path} was made with {about}, expected {expected}")
                stored = set(file.keys())
                names = {field: name for field, name in STORED_NAMES.items() if name in stored}
                return TargetStates(**{field: file.get_tensor(name) for field, name in names.items()})
        except SafetensorError as error:
            raise ValueError(f"data: {path} cannot be read ({error}); remove it to have it made again") from error

    def _metadata(self, dialogue: Dialogue) -> dict[str, str]:
        return {**self._about, "tokens": hashlib.sha256(repr(dialogue.tokens).encode()).hexdigest()[:16]}

    def _write(self, path: Path, states: TargetStates, about: dict[str, str]) -> None:
        halves = _halves(states)
        tensors = {name: getattr(halves, field) for field, name in STORED_NAMES.items()}
        with atomic_file(path) as part:
            save_file({name: x.contiguous() for name, x in tensors.items() if x is not None}, part, metadata=about)


def _halves(states: TargetStates) -> TargetStates:
    return TargetStates(**{f.name: half(getattr(states, f.name)) for f in fields(TargetStates)})
