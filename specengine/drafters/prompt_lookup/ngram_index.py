"""Where each n-gram of a request occurred before."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 16  # tokens of a match, at most


class NgramIndex:
    """Indexes a request's n-grams, as chains from the newest end back; grows with the request.

    An n-gram's end is the position of the token after it. The index holds integers only: an object per n-gram would
    start the garbage collector in the middle of a prompt.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.lengths = range(min_ngram, max_ngram + 1)
        self._newest: dict[int, dict[int, int]] = {n: {} for n in self.lengths}  # n-gram -> newest end
        self._earlier: dict[int, list[int]] = {n: [0] for n in self.lengths}  # end -> the one before, 0: none
        self._indexed = 0  # tokens indexed so far

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the n-grams that end before the last token: the last one has no continuation yet."""
        for end in range(self._indexed + 1, len(tokens)):
            for n, key in zip(self.lengths, self._keys(tokens, end), strict=True):
                self._earlier[n].append(self._newest[n].get(key, 0))
                if n <= end:
                    self._newest[n][key] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def matches(self, tokens: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Returns (end, length of the match) where the last tokens occurred before, longest first, then newest.

        most: occurrences looked at per n-gram length.
        """
        found: dict[int, int] = {}
        count = len(tokens)
        for n, key in zip(self.lengths, self._keys(tokens, count), strict=True):
            end = self._newest[n].get(key, 0) if n <= count else 0
            for _ in range(most):
                if not end:
                    break
                if end not in found:
                    length = n
                    while length < min(LONGEST, end) and tokens[end - length - 1] == tokens[count - length - 1]:
                        length += 1
                    found[end] = length
                end = self._earlier[n][end]
        return sorted(found.items(), key=lambda match: (-match[1], -match[0]))

    def _keys(self, tokens: Sequence[int], end: int) -> list[int]:
        """Returns the n-grams before `end` as integers, one per length; meaningless where n is more than end."""
        keys: list[int] = []
        key = 0
        for n in range(1, self.lengths[-1] + 1):
            key = key << 32 | tokens[end - n] if n <= end else 0
            if n >= self.lengths[0]:
                keys.append(key)
        return keys
