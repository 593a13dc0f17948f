"""Sentencepiece BPE (pieces with scores, byte fallback) rebuilt as a `tokenizers` BPE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from specengine.tokenizer.backend_limits import check_entries, library_errors

SPACE = "▁"
# A unigram model or a normalising model encodes this text differently from the rebuilt one: it has whitespace runs,
# digits, scripts in and out of the vocabulary, ligatures and full-width forms.
_PROBE = (
    "  The  quick\tbrown fox,\n\n    def f(x): return x**2 + 3.14159 # ﬁ ① Ａ é e\u0301 你好 🦙🏽 café Ünïcode  12345 "
)


class TokenType(IntEnum):
    """Kinds of vocabulary entries, with the numbers of sentencepiece and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Returns the entries that are matched before a text is split: control tokens (special) and user-defined ones."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    return [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in special or kind == TokenType.USER_DEFINED
    ]


def build_backend(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    add_space_prefix: bool = True,
    first_segment_only: bool = False,
) -> tokenizers.Tokenizer:
    """Builds a `tokenizers.Tokenizer` that encodes like the sentencepiece model.

    first_segment_only: the space prefix precedes only the text (`legacy: false`). By default it also follows every
    special token.
    """
    unknown = tokens[types.index(TokenType.UNKNOWN)] if TokenType.UNKNOWN in types else None
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(tokens, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    escape = normalizers.Replace(" ", SPACE)
    if not add_space_prefix:
        backend.normalizer = escape
    elif first_segment_only:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * add_space_prefix)
    backend.add_tokens(added_tokens(tokens, types))
    return backend


@dataclass(frozen=True)
class Pieces:
    """The entries of a `tokenizer.model`. backend: encodes them, with the space prefix after special tokens too."""

    tokens: list[str]
    scores: list[float]
    types: list[TokenType]
    add_space_prefix: bool
    bos: int | None
    eos: int | None
    backend: tokenizers.Tokenizer


def read_model_file(
    path: Path, first_segment_only: bool = False
) -> tuple[tokenizers.Tokenizer, int | None, int | None]:
    """Reads a `tokenizer.model`. Returns the backend, the BOS id and the EOS id. Raises as `read_pieces`."""
    pieces = read_pieces(path)
    backend = pieces.backend
    if first_segment_only and pieces.add_space_prefix:
        backend = build_backend(pieces.tokens, pieces.scores, pieces.types, first_segment_only=True)
    return backend, pieces.bos, pieces.eos


def read_pieces(path: Path) -> Pieces:
    """Reads the entries of a `tokenizer.model`.

    Raises ValueError naming the file if it is corrupt, normalises text, or is no BPE model.
    """
    import sentencepiece  # needed only by folders without tokenizer.json

    data = path.read_bytes()
    with library_errors(f"{path}: not a sentencepiece model"):
        if not data:
            raise ValueError("the file is empty")
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        tokens = [processor.id_to_piece(index) for index in range(processor.vocab_size())]
    check_entries(tokens, str(path))
    with library_errors(str(path)):
        return _pieces(processor, tokens)


def _pieces(processor: Any, tokens: list[str]) -> Pieces:
    scores = [processor.get_score(index) for index in range(len(tokens))]
    types = _types(processor, tokens)
    add_space_prefix = processor.encode("x", out_type=str)[0].startswith(SPACE)
    backend = build_backend(tokens, scores, types, add_space_prefix=add_space_prefix)
    if backend.encode(_PROBE).ids != processor.encode(_PROBE):
        raise ValueError("encodes unlike a sentencepiece BPE model without text normalisation, which was expected")
    bos, eos = (None if index < 0 else index for index in (processor.bos_id(), processor.eos_id()))
    return Pieces(tokens, scores, types, add_space_prefix, bos, eos, backend)


def _types(processor: Any, tokens: Sequence[str]) -> list[TokenType]:
    # The library has no query for user-defined pieces. They are the pieces that no merge can produce.
    def kind(index: int, token: str) -> TokenType:
        if processor.is_control(index):
            return TokenType.CONTROL
        if processor.is_unknown(index):
            return TokenType.UNKNOWN
        if processor.is_unused(index):
            return TokenType.UNUSED
        if processor.is_byte(index):
            return TokenType.BYTE
        mergeable = len(token) == 1 or any(token[:at] in known and token[at:] in known for at in range(1, len(token)))
        return TokenType.NORMAL if mergeable else TokenType.USER_DEFINED

    known = set(tokens)
    return [kind(index, token) for index, token in enumerate(tokens)]


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (TokenType.NORMAL, TokenType.UNUSED)
    }
    merges = [
        (score, at, token[:at], token[at:])
        for token, score in normal.items()
        for at in range(1, len(token))
        if token[:at] in normal and token[at:] in normal
    ]
    # The piece with the best score is merged first, from the split with the longest left part.
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    return [(left, right) for _, _, left, right in merges]
