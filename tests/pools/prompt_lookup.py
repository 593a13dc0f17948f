"""NgramIndex in Python."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LONGEST = 16  # tokens of a match, at most


class SlowIndex:
    """Indexes a request's n-grams, as chains from the newest end back; grows with the request.

    An n-gram's end is the position of the token after it.
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

    def draft(
        self, tokens: Sequence[int], most: int, nodes: int, deepest: int, rates: Sequence[float], least: float
    ) -> tuple[list[int], list[int], list[int]]:
        """Returns tokens, parents and kinds of the tree behind the text, likeliest node first."""
        self.extend(tokens)
        self.found, self.text = self.matches(tokens, most), list(tokens)
        drafted, parents, kinds = [tokens[-1]], [-1], [-1]
        waiting: list[tuple] = []  # a heap of (-probability, number, parent, depth, token, kind, matches)
        node = depth = number = 0
        probability, matches = 1.0, self.found
        while len(drafted) < nodes:
            if depth < deepest:
                for kind, token, rest in self._branches(matches):
                    number += 1  # breaks ties by order of arrival
                    heapq.heappush(waiting, (-probability * rates[kind], number, node, depth + 1, token, kind, rest))
            if not waiting or -waiting[0][0] < least:
                break
            probability, _, parent, depth, token, kind, matches = heapq.heappop(waiting)
            probability = -probability
            node = len(drafted)
            drafted.append(token)
            parents.append(parent)
            kinds.append(kind)
        return drafted, parents, kinds

    def judge(self, committed: Sequence[int]) -> list[tuple[int, bool]]:
        """Returns the kind of every token that follows a match on the committed path, and whether it is committed."""
        judged, matches = [], self.found
        for token in committed:
            branches = self._branches(matches)
            judged += [(kind, branch == token) for kind, branch, _ in branches]
            matches = next((rest for _, branch, rest in branches if branch == token), [])
        return judged

    def _branches(self, matches: list[tuple[int, int]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Returns (kind, token, its matches one token further) of each token that follows a match."""
        following: dict[int, list[tuple[int, int]]] = {}
        for end, length in matches:
            if end < len(self.text):
                following.setdefault(self.text[end], []).append((end + 1, length + 1))
        branches: list[tuple[int, int, list[tuple[int, int]]]] = []
        for token, rest in following.items():
            bits = min(LONGEST, rest[0][1] - 1).bit_length()
            branches.append((2 * (bits - 1) + bool(branches), token, rest))
        return branches
