"""The text between two calls, and after the last call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specengine.tool_calls.events import Parsing
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import SPACES

_SEPARATORS = SPACES + ",;"


def parse_more(text: GrowingText, parse: Callable[[], Parsing[bool]]) -> Parsing[None]:
    """Reads further calls, with separators between them or none.

    parse: reads a call. Where none begins, it yields no event and returns False.
    """

    def parse_next() -> Parsing[bool]:
        yield from text.skip(_SEPARATORS)
        return (yield from parse())

    while (yield from text.attempt(parse_next())):
        pass


def skip_closers(text: GrowingText, closers: Sequence[str]) -> Parsing[None]:
    """Reads closing tags, which may lack their bracket, and the space and separators before them.

    closers: the tags without the bracket. The end of the text may cut the last one.
    """
    found = True
    while found:
        start = text.keep()
        yield from text.skip(_SEPARATORS)
        found = False
        for tag in closers:
            found = found or (yield from text.accept_cut(tag))
        if found:
            yield from text.accept(">")
        elif (yield from text.next_char()):
            text.rewind(start)
        text.release()


def skip_separators(text: GrowingText, openers: Sequence[str]) -> Parsing[None]:
    """Reads the comma or semicolon between a call and the next opening tag, or the end."""
    start = text.keep()
    yield from text.skip(SPACES)
    before = text.keep()
    yield from text.skip(_SEPARATORS)
    behind = text.position
    follows = behind > before and not (yield from text.next_char())
    for tag in openers:
        follows = follows or (behind > before and (yield from text.accept(tag)))
    text.rewind(behind if follows else start)
    text.release()
    text.release()
