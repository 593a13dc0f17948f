"""The text of one request: tokens are detokenised when the text is read, or at once where stop strings are searched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from specengine.tokenizer import Detokenizer, StopSearch, StopStrings, Tokenizer

# A leading space, or the rest of a character, depends on how the prompt ends.
PROMPT_TAIL = 4


class OutputText:
    """Turns the output tokens of one request into text, and finds its stop strings.

    tokenizer: None leaves the text empty.  prompt: the token ids that the text continues.
    stop: strings, or what makes their search.
    hidden: ids without text in any case: those that end a text, special or not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop: Sequence[str] | Callable[[], StopSearch],
        skip_special_tokens: bool = True,
        hidden: Collection[int] = (),
    ) -> None:
        self._detokenizer: Detokenizer | None = (
            tokenizer.detokenizer(skip_special_tokens, hidden) if tokenizer else None
        )
        if self._detokenizer:
            self._detokenizer.feed(list(prompt[-PROMPT_TAIL:]))
        self._stops: StopSearch | None = stop() if callable(stop) else StopStrings(stop) if stop else None
        self._pieces: list[str] = []
        self._undecoded: list[int] = []

    def append(self, token: int, may_end: bool = True) -> bool:
        """Adds a token; returns whether a stop string ends there.  may_end: whether one may."""
        if self._stops is None or self._detokenizer is None:
            self._undecoded.append(token)
            return False
        piece, stopped = self._stops.feed(self._detokenizer.feed([token]), may_end)
        self._pieces.append(piece)
        return stopped

    def take(self) -> str:
        """Returns the text completed since the last call."""
        self._decode()
        text, self._pieces = "".join(self._pieces), []
        return text

    def finish(self) -> None:
        """Releases the text held back: an incomplete character, a possible beginning of a stop string."""
        self._decode()
        rest = self._detokenizer.finish() if self._detokenizer else ""
        if self._stops and self._stops.matched is not None:
            rest = ""
        elif self._stops:
            rest, stopped = self._stops.feed(rest)
            rest += "" if stopped else self._stops.finish()
        self._pieces.append(rest)

    def _decode(self) -> None:
        # All at once and outside of cycles: between two passes the processor's caches are full of weights.
        tokens, self._undecoded = self._undecoded, []
        if self._detokenizer and tokens:
            self._pieces.append(self._detokenizer.feed(tokens))
