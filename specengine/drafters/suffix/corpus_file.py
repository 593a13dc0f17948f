"""A corpus that drafts are copied from: token ids and their suffix array, in a safetensors file mapped into memory.

tokens: uint16 [n] where the ids leave 65535 free, else int32 [n]: texts one after the other, the highest uint16 or -1
behind each.  order: int32 [n], see sort_suffixes.

A packed corpus has `packed` in their place: the tokens, compressed by xz, uint8; the metadata's `tokens` is their type.
The first drafter sorts them and keeps both tensors in the cache folder.
"""

from __future__ import annotations

import hashlib
import lzma
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specengine._C import TextCorpus, sort_suffixes
from specengine.tokenizer import Tokenizer
from specengine.utils.atomic_file import atomic_file
from specengine.utils.kept_tensors import kept_tensors, most_unpacked

_FORMAT = "specengine-corpus-1"
_TOKENIZER = "tokenizer"  # of the file's metadata
_PACKED = "packed"
_KINDS = {"uint16": torch.uint16, "int32": torch.int32}
_END, _NARROW_END = -1, 0xFFFF
_SAMPLE = "The quick brown fox doesn't jump; it measures 1,234.5 km²:\n\tdef naïve(x): return [x**2]  # ὦ 你好"


def write_corpus(
    path: Path, texts: Iterable[Sequence[int]], tokenizer: Tokenizer | None = None, *, packed: bool = False
) -> int:
    """Writes a corpus of texts, whole or not at all; returns how many tokens it has.

    tokenizer: of the texts; the file records it.  packed: an eighth of the size; the first start takes longer.
    Raises ValueError where the texts are empty.
    """
    joined = array("i")  # a list would take eight times as much
    for text in texts:
        if text:
            joined.extend(text)
            joined.append(_END)
    if not joined:
        raise ValueError("texts: there is nothing in them")
    tokens = torch.frombuffer(joined, dtype=torch.int32)
    about = {"format": _FORMAT} | ({_TOKENIZER: _mark(tokenizer)} if tokenizer else {})
    narrow = tokens.to(torch.uint16) if tokens.max() < _NARROW_END else tokens  # -1 becomes _NARROW_END
    if packed:
        small = lzma.compress(narrow.numpy().tobytes(), preset=9 | lzma.PRESET_EXTREME)
        stored = {_PACKED: torch.frombuffer(bytearray(small), dtype=torch.uint8)}
        about["tokens"] = str(narrow.dtype).removeprefix("torch.")
    else:
        stored = {"tokens": narrow, "order": _order(tokens)}
    with atomic_file(path) as part:
        save_file(stored, part, about)
    return len(tokens)


def _order(tokens: torch.Tensor) -> torch.Tensor:
    order = torch.empty_like(tokens)
    sort_suffixes(tokens, order)
    return order


def read_corpus(path: Path) -> dict[str, torch.Tensor]:
    """Reads `tokens` and `order` of a corpus. Raises ValueError for another file."""
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
        if about.get("format") != _FORMAT:
            raise ValueError("it is no corpus that `specengine corpus` wrote")
        if "tokens" not in about:
            return {name: file.get_tensor(name) for name in ("tokens", "order")}
        small, kind = file.get_tensor(_PACKED), about["tokens"]
    if kind not in _KINDS or small.dtype != torch.uint8:
        raise ValueError(f"its tokens are {kind}, packed as {small.dtype}")
    small = small.numpy().tobytes()
    return kept_tensors(hashlib.sha256(small + kind.encode()).hexdigest(), lambda: _unpacked(small, kind))


def _unpacked(small: bytes, kind: str) -> dict[str, torch.Tensor]:
    unpacker = lzma.LZMADecompressor(memlimit=1 << 30)
    try:
        raw = unpacker.decompress(small, most_unpacked(len(small)))
    except lzma.LZMAError as error:
        raise ValueError(f"its tokens are damaged: {error}") from error
    if not unpacker.eof:
        raise ValueError("its tokens are cut off, or too many for the file")
    tokens = torch.frombuffer(bytearray(raw), dtype=_KINDS[kind])
    wide = tokens.int()
    return {
        "tokens": tokens,
        "order": _order(torch.where(wide == _NARROW_END, _END, wide) if kind == "uint16" else wide),
    }


def open_corpus(path: Path, vocab_size: int) -> TextCorpus:
    """Opens the corpus of a file.

    Raises FileNotFoundError, and ValueError for a file that holds no corpus or tokens beyond this vocabulary.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a corpus, a file that `specengine corpus` wrote")
    try:
        tensors = read_corpus(path)
        tokens = tensors["tokens"]
        corpus = TextCorpus(tokens, tensors["order"])
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: the corpus cannot be read ({error}); write it anew") from error
    if len(tokens) and (most := _highest(tokens)) >= vocab_size:
        raise ValueError(f"{path}: its texts have token {most}, the target's vocabulary ends at {vocab_size - 1}")
    return corpus


def _highest(tokens: torch.Tensor) -> int:
    """Returns the highest token id."""
    values = tokens.numpy()
    return int(values.max(initial=0, where=values != _NARROW_END) if values.dtype == "uint16" else values.max())


def check_corpus_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Raises ValueError where the file names another tokenizer than this one."""
    with safe_open(path, "pt") as file:
        if file.metadata().get(_TOKENIZER, mark := _mark(tokenizer)) != mark:
            raise ValueError(f"{path}: its texts are of another tokenizer than the target's")


def _mark(tokenizer: Tokenizer) -> str:
    tokens = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
