"""A tokenizer as the grammar engine reads it: the bytes of every token, and how it encodes forced text."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from specengine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MARK = "\x02"  # of no text; no entry merges with it
# Tokens of plain text up to these lengths share a mask each. Where a string may have n more characters, only longer
# ones are looked at. A mask of a usual schema takes 27 us at 49k tokens, with the two lengths of llguidance 34 us.
LENGTHS = (2, 4, 6, 8, 10, 14, 20, 30)
PLAIN = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{PLAIN}{{1,{length}}}" for length in LENGTHS), f"{PLAIN}+"]


class VocabularyReader:
    """Shows the tokens of a Tokenizer to llguidance.

    vocab_size: of the model; ids without an entry have no bytes, so no text has them.
    special_token_ids: tokens that only a grammar that names them allows. They are those that the tokenizer calls
      special, and other added ones whose text is <in angle brackets>: models use both to mark parts of a text.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = min(eos_token_ids)
        known = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
        marks = (
            token
            for token, (text, special) in tokenizer.added_tokens.items()
            if special or (text.startswith("<") and text.endswith(">"))
        )
        self.special_token_ids = sorted({*marks, *eos_token_ids})
        added = tokenizer.added_tokens
        self._special = {
            token: added[token][0] if token in added else tokenizer.token_text(token)
            for token in self.special_token_ids
        }
        self._prefix = self._encode(MARK) if self._bytes(self._encode("a")) != b"a" else []

    def __call__(self, text: str) -> list[int]:
        """Encodes a text in the middle of another: without a space before it, and without special tokens."""
        ids = self._encode(MARK + text)[len(self._prefix) :] if self._prefix else self._encode(text)
        for token in ids:
            if token in self._special:
                inside = text.index(self._special[token]) + 1
                return [*self(text[:inside]), *self(text[inside:])]
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self._tokenizer.token_bytes(token) for token in ids)


def read_vocabulary(tokenizer: Tokenizer, eos_token_ids: Collection[int], vocab_size: int) -> LLTokenizer:
    """Makes llguidance's view of a tokenizer.

    Raises ValueError where no token of the model ends a text.
    """
    from llguidance import LLTokenizer, TokenizerWrapper  # 3 MB, needed by constrained requests alone

    ends = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
    if not ends:
        raise ValueError("this model has no end-of-text token, which ends a constrained text")
    return LLTokenizer(TokenizerWrapper(VocabularyReader(tokenizer, ends, vocab_size)), eos_token=ends, slices=SLICES)
