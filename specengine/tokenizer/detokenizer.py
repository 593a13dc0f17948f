"""Token ids to text, in time proportional to the new tokens."""

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
    """The printable character that stands for each byte in a byte-level vocabulary, with its byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + rank): byte for rank, byte in enumerate(moved)}


@dataclass(frozen=True)
class PieceDecoder:
    """How one vocabulary entry becomes bytes, read off the decoder of a `tokenizers.Tokenizer`.

    strip_spaces: spaces removed from the beginning of the whole text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_spaces: int = 0

    @classmethod
    def from_backend(cls, decoder: Any, source: str) -> PieceDecoder:
        """Raises: ValueError naming `source` for a decoder that does not work piece by piece."""
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
        """The bytes of a vocabulary entry, which may be part of a character only."""
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
    """FairLock tokens into text as they come, holding back the bytes of a character that is not complete yet.

    `piece_bytes` gives the bytes of a token, empty for the ones to skip. All the text given out, `finish`
    included, equals `Tokenizer.decode` of all the ids. A continuation keeps its leading space if the prompt's
    ids are fed first and their text is dropped.
    """

    def __init__(self, piece_bytes: Callable[[int], bytes], strip_spaces: int = 0) -> None:
        self._piece_bytes = piece_bytes
        self._strip_spaces = strip_spaces
        self.reset()

    def reset(self) -> None:
        """Forgets everything fed so far."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._to_strip = self._strip_spaces

    def feed(self, ids: Iterable[int]) -> str:
        """Takes the next tokens; gives the text they complete."""
        # `index` turns elements of arrays into the ints that the tables are keyed by.
        data = b"".join(self._piece_bytes(index(token_id)) for token_id in ids)
        if self._to_strip and data:
            spaces = min(len(data) - len(data.lstrip(b" ")), self._to_strip)
            self._to_strip = self._to_strip - spaces if spaces == len(data) else 0
            data = data[spaces:]
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Ends the text and starts afresh: U+FFFD for a character left incomplete, else nothing."""
        rest = self._utf8.decode(b"", final=True)
        self.reset()
        return rest
