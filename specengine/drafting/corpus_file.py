"""A corpus that drafts are copied from: texts as token ids and their suffix array, in a safetensors file that is mapped
into memory.

tokens: int32 [n], texts one after the other, -1 behind each.  order: int32 [n], see sort_suffixes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specengine._C import TextCorpus, sort_suffixes

_FORMAT = "specengine-corpus-1"
_END = -1


def write_corpus(path: Path, texts: Iterable[Sequence[int]]) -> int:
    """Puts a corpus of these texts in place, whole or not at all; returns how many tokens it has."""
    tokens = torch.tensor([token for text in texts for token in (*text, _END)], dtype=torch.int32)
    order = torch.empty_like(tokens)
    sort_suffixes(tokens, order)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({"tokens": tokens, "order": order}, part, {"format": _FORMAT})
        part.chmod(0o644)  # safetensors makes files for their owner alone
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return len(tokens)


def open_corpus(path: Path, vocab_size: int) -> TextCorpus:
    """The corpus of a file. Raises FileNotFoundError, and ValueError for a file of something else or of tokens that a
    vocabulary of this size does not have."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a corpus, a file that `specengine corpus` wrote")
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("format") != _FORMAT:
                raise ValueError(f"{path}: it is no corpus that `specengine corpus` wrote")
            tokens, order = file.get_tensor("tokens"), file.get_tensor("order")
            corpus = TextCorpus(tokens, order)
    except SafetensorError as error:
        raise ValueError(f"{path}: the corpus cannot be read ({error}); write it anew") from error
    if len(tokens) and (most := int(tokens.max())) >= vocab_size:
        raise ValueError(f"{path}: its texts have token {most}, the target's vocabulary ends at {vocab_size - 1}")
    return corpus
