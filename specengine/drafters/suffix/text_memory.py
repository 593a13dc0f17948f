"""Texts of earlier requests, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock

from specengine._C import SuffixAutomaton


class TextMemory:
    """Remembers at least the last `tokens` tokens and at most twice as many.

    An automaton forgets nothing, so two automata take turns.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._waiting: deque[list[int]] = deque()  # add() is called in any thread
        self._lock = Lock()
        self._now = SuffixAutomaton()
        self._before = SuffixAutomaton()

    def add(self, text: list[int]) -> None:
        """Remembers a text from the next call of automata() on. May be called in any thread."""
        self._waiting.append(text)

    def automata(self) -> Sequence[SuffixAutomaton]:
        """Returns automata of all remembered texts."""
        with self._lock:  # engines may share a drafter
            while self._waiting:
                self._take(self._waiting.popleft())
            return [each for each in (self._now, self._before) if len(each)]

    def _take(self, text: list[int]) -> None:
        while text:
            room = self._tokens - len(self._now)
            self._now.append(text[:room])
            text = text[room:]
            if len(self._now) == self._tokens:
                self._now, self._before = SuffixAutomaton(), self._now
        self._now.cut()
