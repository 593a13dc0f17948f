"""What the stand-in refuses, in place of CUDA's errors and of torch's own assertions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Refused(RuntimeError):
    """A call that CUDA or torch's allocator forbids."""


class Refusals:
    """Raises and remembers refusals, because destructors cannot raise and a test's threads may hide one."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def refuse(self, message: str) -> Refused:
        """Notes a refusal and returns it, to be raised."""
        self.seen.append(message)
        return Refused(message)

    @contextmanager
    def expected(self, pattern: str) -> Iterator[None]:
        """Expects the block to do something that is refused with such a message."""
        before = len(self.seen)
        with suppress(Refused):
            yield
        seen, self.seen[before:] = self.seen[before:], []
        assert any(re.search(pattern, message) for message in seen), f"{pattern!r} was not refused; refused: {seen}"
