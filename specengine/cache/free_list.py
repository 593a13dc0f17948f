"""Lists the pages or slots that no request has, and those of them that still hold memory."""

from __future__ import annotations

from collections.abc import Iterable


class FreeList:
    """Gives out numbers from 0 to `size` - 1, those given back last first, for they have memory already."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._opened = 0  # numbers from here on were never given out
        self._back: list[int] = []
        self._bare = 0  # the first ones of those given back have no memory

    def __len__(self) -> int:
        return self._size - self._opened + len(self._back)

    @property
    def with_memory(self) -> int:
        """Numbers that have memory, given out or not."""
        return self._opened - self._bare

    def take(self, count: int) -> list[int]:
        """Returns `count` numbers, at most as many as there are."""
        left = max(0, len(self._back) - count)
        self._back, taken = self._back[:left], self._back[left:]
        self._bare = min(self._bare, left)
        first, self._opened = self._opened, self._opened + count - len(taken)
        return [*taken, *range(first, self._opened)]

    def give_back(self, numbers: Iterable[int]) -> None:
        """Takes numbers back."""
        self._back += numbers

    def strip(self, keep: int) -> list[int]:
        """Returns, in order, the numbers whose memory is to go back to the system: all but the last `keep` of these."""
        end = max(self._bare, len(self._back) - keep)
        stripped, self._bare = sorted(self._back[self._bare : end]), end
        return stripped
