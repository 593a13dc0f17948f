"""States of a target kept between epochs: a file of float16 rows per dialogue, made when first asked for.

float16 rounds less than what a float16 cache or an 8-bit weight already lost; what is larger than it holds is clamped.
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

from specengine.train.data.dialogues import Dialogue
from specengine.train.data.target_states import States
from specengine.utils.atomic_file import atomic_file

T = TypeVar("T", torch.Tensor, None)


def half(x: T) -> T:
    """As float16 on the CPU; integers as they are."""
    if x is None or not x.is_floating_point():
        return x if x is None else x.cpu()
    limit = torch.finfo(torch.float16).max
    return x.clamp(-limit, limit).to("cpu", torch.float16)


class StateStore:
    """of: makes the states of a dialogue.  folder: where they are kept; None: in memory.  about: what they are of."""

    def __init__(self, of: Callable[[Sequence[int]], States], folder: Path | None, about: dict[str, str]) -> None:
        self._of, self._folder, self._about = of, folder, about
        self._memory: dict[int, States] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def states(self, number: int, dialogue: Dialogue) -> States:
        """Of the dialogue of this number. Raises ValueError for a file of other states."""
        if self._folder is None:
            if number not in self._memory:
                made = self._of(dialogue.tokens)
                self._memory[number] = States(*(half(getattr(made, f.name)) for f in fields(States)))
            return self._memory[number]
        path = self._folder / f"states-{number:07d}.safetensors"
        if not path.exists():
            self._write(path, self._of(dialogue.tokens), self._of_dialogue(dialogue))
        try:
            with safe_open(path, "pt") as file:
                if (about := dict(file.metadata() or {})) != (expected := self._of_dialogue(dialogue)):
                    raise ValueError(f"data: {path} was made with {about}, expected {expected}")
                return States(**{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"data: {path} cannot be read ({error}); remove it to have it made again") from error

    def _of_dialogue(self, dialogue: Dialogue) -> dict[str, str]:
        return {**self._about, "tokens": hashlib.sha256(repr(dialogue.tokens).encode()).hexdigest()[:16]}

    def _write(self, path: Path, states: States, about: dict[str, str]) -> None:
        tensors = {f.name: half(getattr(states, f.name)) for f in fields(States)}
        with atomic_file(path) as part:
            save_file({k: x.contiguous() for k, x in tensors.items() if x is not None}, part, metadata=about)
