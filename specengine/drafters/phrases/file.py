"""A phrase pool in a safetensors file, so that it outlives its engine.

tokens: int32 [k], in order of their last insertion, oldest first.  counts: int32 [k], phrases of each token.
phrases: int32 [sum of counts, length], the oldest of a token first. The metadata has a checksum of all three.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specengine._C import PhrasePool
from specengine.drafters.shipped import FINGERPRINT, fingerprint
from specengine.models.transformer import Transformer
from specengine.utils.atomic_file import atomic_file

_FORMAT = "specengine-phrases-1"
_PARTS = ("tokens", "counts", "phrases")


def save_pool(path: str | Path, pool: PhrasePool, target: Transformer) -> None:
    """Writes a file, whole or not at all: a kill at any moment leaves the file before. Raises OSError."""
    path = Path(os.path.expanduser(path))
    # The pool may be in use, so a token can lose its phrases after it was listed.
    phrases = {token: own for token in pool.tokens() if (own := pool.newest(token, pool.width))}
    parts = {
        "tokens": np.array([*phrases], dtype=np.int32),
        "counts": np.array([len(own) for own in phrases.values()], dtype=np.int32),
        "phrases": np.array([p for own in phrases.values() for p in own], dtype=np.int32).reshape(-1, pool.length),
    }
    about = {"format": _FORMAT, FINGERPRINT: fingerprint(target), "sum": _sum(parts)}
    with atomic_file(path) as part:
        save_file(parts, part, about)


def open_pool(path: str | Path, shape: tuple[int, int, int], target: Transformer) -> PhrasePool:
    """Returns a pool of this shape (length, width, keys) with the newest phrases of a file.

    Raises FileNotFoundError, and ValueError for a file that is damaged, holds no phrases, or holds phrases of another
    length or model.
    """
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        raise FileNotFoundError(f"pool: {path}: expected a file of phrases")
    try:
        parts = _read(path, target)
    except (SafetensorError, TypeError, ValueError, OSError) as error:  # TypeError: numpy has no bfloat16
        raise ValueError(f"pool: {path} cannot be used: {error}") from error
    pool = PhrasePool(*shape)
    phrases = parts["phrases"]
    if phrases.shape[1] != pool.length:
        raise ValueError(f"pool: {path} has phrases of {phrases.shape[1]} tokens, expected {pool.length}")
    ends = parts["counts"].cumsum()
    for token, count, end in zip(parts["tokens"].tolist(), parts["counts"].tolist(), ends.tolist(), strict=True):
        for phrase in phrases[end - count : end].tolist():
            pool.insert(token, phrase)
    return pool


def _read(path: Path, target: Transformer) -> dict[str, np.ndarray]:
    with safe_open(path, "np") as file:
        about = file.metadata() or {}
        if about.get("format") != _FORMAT or set(file.keys()) != set(_PARTS):
            raise ValueError("it is no file of phrases")
        parts = {name: file.get_tensor(name) for name in _PARTS}
    tokens, counts, phrases = (parts[name] for name in _PARTS)
    if about.get("sum") != _sum(parts):
        raise ValueError("it is damaged, its checksum is another")
    if any(part.dtype != np.int32 for part in parts.values()) or (tokens.ndim, counts.ndim, phrases.ndim) != (1, 1, 2):
        raise ValueError("it is damaged, its tensors have other shapes")
    if len(tokens) != len(counts) or counts.sum() != len(phrases) or (counts < 1).any():
        raise ValueError("it is damaged, its counts are wrong")
    ids = np.concatenate([tokens, phrases.ravel()])
    known = ((ids >= 0) & (ids < target.config.vocab_size)).all()  # models without training have one fingerprint
    if about.get(FINGERPRINT) != fingerprint(target) or not known:
        raise ValueError("its phrases are another model's")
    return parts


def _sum(parts: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(parts[name].tobytes() for name in _PARTS)).hexdigest()
