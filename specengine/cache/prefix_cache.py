"""Which pages hold how texts begin: a tree of them, whose nodes are found by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specengine._C import PAGE_SIZE

if TYPE_CHECKING:
    from specengine.ops import Ops


@dataclass
class PrefixCounts:
    """What a prefix cache did so far. looked_up, hit: tokens of prompts, and those of them that were cached.
    evicted: pages that made room.  cached: pages whose text can be found now, whether in use or not."""

    looked_up: int = 0
    hit: int = 0
    evicted: int = 0
    cached: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up; 0 before there are any."""
        return self.hit / self.looked_up if self.looked_up else 0.0


@dataclass(frozen=True, eq=False)
class Sharing:
    """Who shares pages: requests with the same object, as one drafter's keys and values lie in its companion's.

    step: tokens; what is shared ends at a multiple of it.  answers: whether generated tokens are shared, too.
    """

    step: int = PAGE_SIZE
    answers: bool = True

    @staticmethod
    def under(ops: Ops) -> Sharing:
        """What has the bits that a request's own prefill would write.

        Where the bits of a row depend on the rows beside it those are whole passes of prompts, nothing less.
        """
        return Sharing() if ops.strict else Sharing(ops.prefill_rows, answers=False)


@dataclass(eq=False, slots=True)
class _Node:
    page: int = -1
    key: tuple = ()
    parent: _Node | None = None
    users: int = 1
    children: dict[tuple, _Node] = field(default_factory=dict)


class PrefixIndex:
    """Pages by the text from its first token to the page's end; who holds a page holds those before it, too.

    A key is the page's tokens and the one behind them: a drafter's last pair of a page has that one in it. Keys are
    compared token by token, so texts with equal hashes are told apart. Pages that nobody holds can be evicted, the
    least recently held first; of one text that is the last page first.
    """

    def __init__(self, page_size: int = PAGE_SIZE) -> None:
        self.counts = PrefixCounts()
        self._page_size, self._root = page_size, _Node()
        self._nodes: dict[int, _Node] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def pages(self) -> list[int]:
        """All that it knows."""
        return [*self._nodes]

    @property
    def unused(self) -> int:
        """Pages that can be evicted."""
        return len(self._unused)

    def find(self, sharing: Sharing, text: Sequence[int]) -> list[int]:
        """The pages of the longest beginning that is known."""
        found, node = [], self._root
        for key in self._keys(sharing, text):
            child = node.children.get(key)
            if child is None:
                break
            found.append(child.page)
            node = child
        whole = sharing.step // self._page_size
        return found[: len(found) // whole * whole]

    def add(self, sharing: Sharing, text: Sequence[int], pages: list[int]) -> list[int]:
        """Makes a text known whose holder has these pages.

        Where a page of the same text is known, it takes the other one's place in `pages`; returns those, nobody's now.
        """
        replaced, node = [], self._root
        for i, key in enumerate(self._keys(sharing, text)):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[pages[i]] = _Node(pages[i], key, node)
                self.counts.cached += 1
            elif child.page != pages[i]:
                self.hold([child.page])
                replaced.append(pages[i])
                pages[i] = child.page
            node = child
        return replaced

    def hold(self, pages: Sequence[int]) -> None:
        """One more request holds these pages, which are known."""
        for page in pages:
            self._nodes[page].users += 1
            self._unused.pop(page, None)

    def drop(self, pages: Sequence[int]) -> list[int]:
        """A request holds these pages no longer; returns those that are not known, so that nobody has them now."""
        unknown = [page for page in pages if page not in self._nodes]
        for page in reversed(pages):
            node = self._nodes.get(page)
            if node is not None:
                node.users -= 1
                if not node.users:
                    self._unused[page] = None
        return unknown

    def evict(self) -> int:
        """Forgets the page that nobody has held for longest, and returns it."""
        page, _ = self._unused.popitem(last=False)
        node = self._nodes.pop(page)
        assert node.parent is not None  # only the root has none, and no page
        del node.parent.children[node.key]
        self.counts.evicted += 1
        self.counts.cached -= 1
        return page

    def renumber(self, numbers: dict[int, int]) -> None:
        """Pages get other numbers."""
        self._nodes = {numbers[page]: node for page, node in self._nodes.items()}
        self._unused = OrderedDict.fromkeys(numbers[page] for page in self._unused)
        for page, node in self._nodes.items():
            node.page = page

    def _keys(self, sharing: Sharing, text: Sequence[int]) -> Iterator[tuple]:
        """Of the pages up to the last whole step that has a token behind it."""
        size = self._page_size
        for start in range(0, (len(text) - 1) // sharing.step * sharing.step, size):
            yield (sharing, *text[start : start + size + 1])
