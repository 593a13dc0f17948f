"""The prefix cache: a tree of pages, each found by its tokens and those of the pages before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specengine._C import PAGE_SIZE
from specengine.ops import Ops


@dataclass
class PrefixCounts:
    """Counts prefix hits.  looked_up, hit: prompt tokens looked up, and those of them that were cached.
    evicted: pages reused for other texts.  cached: pages that a lookup can find now, in use or not."""

    looked_up: int = 0
    hit: int = 0
    evicted: int = 0
    cached: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits as a share of the tokens looked up; 0 before the first lookup."""
        return self.hit / self.looked_up if self.looked_up else 0.0


@dataclass(frozen=True, eq=False)
class Sharing:
    """Requests with the same Sharing object share pages; a drafter's companion pool belongs to one such object.

    step: shared pages end at a multiple of this many tokens.  answers: pages of generated tokens are shared too.
    """

    step: int = PAGE_SIZE
    answers: bool = True

    @staticmethod
    def under(ops: Ops) -> Sharing:
        """Shares only pages with the bits that a request's own prefill would write.

        Without strict ops a row's bits depend on the rows beside it, so only whole prefill passes are shared.
        """
        return Sharing() if ops.strict else Sharing(ops.prefill_rows, answers=False)


class Replaced(NamedTuple):
    """A holder's page that is free now, and the known one that took its place.

    fills: the drafter's part of the known page is not filled yet; the freed page has it.
    """

    page: int
    known: int
    fills: bool


@dataclass(eq=False, slots=True)
class _Node:
    page: int = -1
    key: tuple = ()
    parent: _Node | None = None
    filled: bool = True
    users: int = 1
    children: dict[tuple, _Node] = field(default_factory=dict)


class PrefixIndex:
    """Finds pages by the tokens from the start of a text to the end of the page. A holder of a page holds those before
    it too.

    A key is the tokens of a page and the token behind them, which a drafter's last pair of the page contains. Keys are
    compared token by token, so equal hashes cause no false hit. A page without holder can be evicted: least recently
    held first, and of one text the last page first.

    A page is filled where the drafter's keys and values of it are final too. The pages before a filled one are filled.
    """

    def __init__(self, page_size: int = PAGE_SIZE) -> None:
        self.counts = PrefixCounts()
        self._page_size, self._root = page_size, _Node()
        self._nodes: dict[int, _Node] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def pages(self) -> list[int]:
        """All pages of the index."""
        return [*self._nodes]

    @property
    def unused(self) -> int:
        """Pages that can be evicted."""
        return len(self._unused)

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def find(self, sharing: Sharing, text: Sequence[int], filled: bool = True) -> list[int]:
        """Returns the pages of the longest known beginning of a text.  filled: of filled pages alone."""
        found, node = [], self._root
        for key in self._keys(sharing, text):
            child = node.children.get(key)
            if child is None or (filled and not child.filled):
                break
            found.append(child.page)
            node = child
        whole = sharing.step // self._page_size
        return found[: len(found) // whole * whole]

    def add(self, sharing: Sharing, text: Sequence[int], pages: list[int], filled: bool = True) -> list[Replaced]:
        """Adds a text with the pages of its holder.

        A page that is known for the same text replaces the holder's in `pages`; returns the replaced ones, now free.
        filled: the holder's pages are filled; the known ones count as filled from now on.
        """
        replaced, node = [], self._root
        for i, key in enumerate(self._keys(sharing, text)):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[pages[i]] = _Node(pages[i], key, node, filled)
                self.counts.cached += 1
            elif child.page != pages[i]:
                self.hold([child.page])
                replaced.append(Replaced(pages[i], child.page, filled and not child.filled))
                pages[i] = child.page
            child.filled = child.filled or filled
            node = child
        return replaced

    def hold(self, pages: Sequence[int]) -> None:
        """Counts one more holder of these known pages."""
        for page in pages:
            self._nodes[page].users += 1
            self._unused.pop(page, None)

    def drop(self, pages: Sequence[int]) -> list[int]:
        """Counts one holder less; returns the pages that are not in the index, which are free now."""
        unknown = [page for page in pages if page not in self._nodes]
        for page in reversed(pages):
            node = self._nodes.get(page)
            if node is not None:
                node.users -= 1
                if not node.users:
                    self._unused[page] = None
        return unknown

    def evict(self) -> int:
        """Removes the page that has been without holder for longest, and returns it."""
        page, _ = self._unused.popitem(last=False)
        node = self._nodes.pop(page)
        assert node.parent is not None  # only the root has no parent, and it has no page
        del node.parent.children[node.key]
        self.counts.evicted += 1
        self.counts.cached -= 1
        return page

    def renumber(self, numbers: dict[int, int]) -> None:
        """Gives pages other numbers."""
        self._nodes = {numbers[page]: node for page, node in self._nodes.items()}
        self._unused = OrderedDict.fromkeys(numbers[page] for page in self._unused)
        for page, node in self._nodes.items():
            node.page = page

    def _keys(self, sharing: Sharing, text: Sequence[int]) -> Iterator[tuple]:
        """Yields the keys of the pages up to the last whole step with a token behind it."""
        size = self._page_size
        for start in range(0, (len(text) - 1) // sharing.step * sharing.step, size):
            yield (sharing, *text[start : start + size + 1])
