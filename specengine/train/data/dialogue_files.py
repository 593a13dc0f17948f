"""Shards of training data: safetensors files of some dialogues each, which appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specengine.utils.atomic_file import atomic_file


@dataclass(frozen=True)
class Dialogue:
    """tokens: prompt and answer.  answer: where the answer begins, in several turns the first one."""

    tokens: list[int]
    answer: int


def read_dialogues(path: Path) -> Iterator[Dialogue]:
    """Reads the dialogues of a shard."""
    with safe_open(path, "pt") as shard:
        tokens, starts, answers = (shard.get_tensor(name).tolist() for name in ("tokens", "starts", "answers"))
    for begin, end, answer in zip(starts, starts[1:], answers, strict=False):
        yield Dialogue(tokens[begin:end], answer)


def write_shard(path: Path, dialogues: Sequence[Dialogue], about: dict[str, str]) -> None:
    """Writes a shard, whole or not at all. about: metadata that says how it was made."""
    starts = torch.tensor([0, *(len(d.tokens) for d in dialogues)]).cumsum(0)
    tensors = {
        "tokens": torch.tensor([token for d in dialogues for token in d.tokens], dtype=torch.int32),
        "starts": starts,
        "answers": torch.tensor([d.answer for d in dialogues], dtype=torch.int32),
    }
    with atomic_file(path) as part:
        save_file(tensors, part, metadata=about)


def read_about(path: Path) -> dict[str, str]:
    """Reads the metadata of a shard. Raises ValueError for a damaged file."""
    try:
        with safe_open(path, "pt") as shard:
            return dict(shard.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"data: {path} cannot be read ({error}); remove it to have it made again") from error
