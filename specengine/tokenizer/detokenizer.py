"""Incremental decoding of token ids, in time proportional to the new tokens."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Maps the printable characters of a byte-level vocabulary to the bytes they stand for."""
    same = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in same]
    return {chr(byte): byte for byte in same} | {chr(256 + rank): byte for rank, byte in enumerate(moved)}


@dataclass(frozen=True)
class PieceDecoder:
    """Turns one vocabulary entry into bytes, as the decoder of a `tokenizers.Tokenizer` does.

    strip_spaces: number of spaces that decoding removes from the beginning of a text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_spaces: int = 0

    @classmethod
    def from_backend(cls, decoder: Any, source: str) -> PieceDecoder:
        """Reads the steps of a backend's decoder.

        Raises ValueError naming `source` for a decoder that cannot work on single entries.
        """
        spec: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
        steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        fields: dict[str, Any] = {"replacements": ()}
        for step in steps:
            kind = step["type"]
            if kind == "ByteLevel":
                fields["byte_level"] = True
            elif kind == "ByteFallback":
                fields["byte_fallback"] = True
            elif kind == "Replace" and "String" in step["pattern"]:
                fields["replacements"] += ((step["pattern"]["String"], step["content"]),)
            elif kind == "Metaspace":
                fields["replacements"] += ((step["replacement"], " "),)
                fields["strip_spaces"] = 0 if step.get("prepend_scheme") == "never" else 1
            elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
                fields["strip_spaces"] = step["start"]
            elif kind != "Fuse":
                raise ValueError(
                    f"{source}: decoder {kind!r} is not supported; expected ByteLevel, "
                    f"or a sequence of Replace, ByteFallback, Fuse, Strip and Metaspace"
                )
        return cls(**fields)

    def __call__(self, token: str) -> bytes:
        """Returns the bytes of a vocabulary entry, possibly only a part of a character."""
        if self.byte_level:
            alphabet = byte_alphabet()
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")


class Detokenizer:
    """Turns tokens into text as they arrive, and holds back the bytes of an incomplete character.

    piece_bytes: returns the bytes of a token, empty for a token to skip.
    The texts of all feed() calls and of finish() together equal `Tokenizer.decode` of all ids. A continuation keeps
    its leading space if the caller first feeds the prompt's ids and drops their text.
    """

    def __init__(self, piece_bytes: Callable[[int], bytes], strip_spaces: int = 0) -> None:
        self._piece_bytes = piece_bytes
        self._strip_spaces = strip_spaces
        self.reset()

    def reset(self) -> None:
        """Starts a new text."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._to_strip = self._strip_spaces

    def feed(self, ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete."""
        # The tables have int keys, so `index` converts elements of arrays.
        data = b"".join(self._piece_bytes(index(token_id)) for token_id in ids)
        if self._to_strip and data:
            spaces = min(len(data) - len(data.lstrip(b" ")), self._to_strip)
            self._to_strip = self._to_strip - spaces if spaces == len(data) else 0
            data = data[spaces:]
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Ends the text and starts a new one. Returns U+FFFD for an incomplete character, else the empty string."""
        rest = self._utf8.decode(b"", final=True)
        self.reset()
        return rest
