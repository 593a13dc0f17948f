"""Divides the machine's threads: a process that is one of several ranks computes with its share of them."""

from __future__ import annotations

from specengine import _C


class ThreadShare:
    """This process's share of its threads, while it shares the machine with other ranks."""

    def __init__(self) -> None:
        self._whole = 0
        self._sizes: list[int] = []

    def add(self, size: int) -> None:
        """Counts a new group of `size` ranks."""
        if not self._sizes:
            self._whole = _C.num_threads()
        self._sizes.append(size)
        self._set()

    def remove(self, size: int) -> None:
        """Forgets a group of `size` ranks."""
        self._sizes.remove(size)
        self._set()

    def _set(self) -> None:
        _C.set_num_threads(max(1, self._whole // max(self._sizes, default=1)))


thread_share = ThreadShare()
