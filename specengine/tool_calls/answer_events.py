"""Reads an answer: reasoning, content and calls in any order."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.tool_calls.answer_format import AnswerFormat
from specengine.tool_calls.events import Content, Parsing, Reasoning
from specengine.tool_calls.growing_text import GrowingText
from specengine.tool_calls.json_pieces import SPACES
from specengine.tool_calls.reasoning import ReasoningTags
from specengine.tool_calls.several_calls import skip_separators


def parse_answer(text: GrowingText, answer: AnswerFormat) -> Parsing[None]:
    """Reads a whole answer. A tag that closes nothing is no content: that of reasoning, and of a call after a call."""
    dialect, reasoning = answer.dialect, answer.reasoning
    if reasoning and (yield from _opens_reasoning(text, answer, reasoning)):
        yield from _parse_reasoning(text, answer, reasoning)
    openers = dialect.openers if dialect else ()
    if answer.is_constrained and not (yield from _begins_with(text, openers)):
        openers = ()  # the answer is a text of the constraint
    called = bool(dialect and dialect.bare) and (yield from _try_calls(text, answer, "", strict=True))
    thinking = (reasoning.open, reasoning.close) if reasoning and not answer.is_constrained else ()
    while True:
        closers = dialect.closers if dialect and called else ()
        tag = yield from text.stream_until((*openers, *thinking, *closers), Content)
        at = text.position - len(tag)
        if not tag:
            return
        if tag in openers:
            text.rewind(at)
            if (yield from _try_calls(text, answer, tag, strict=False)):
                called = True
            else:
                yield from text.accept(tag)
                yield Content(tag, at)
        elif reasoning and tag == reasoning.open:
            yield from _parse_reasoning(text, answer, reasoning)


def _begins_with(text: GrowingText, tags: Sequence[str]) -> Parsing[bool]:
    """Returns whether one of the tags follows, after space. Reads nothing."""
    start = text.keep()
    yield from text.skip(SPACES)
    found = False
    for tag in tags:
        found = found or (yield from text.accept(tag))
    text.rewind(start)
    text.release()
    return found


def _opens_reasoning(text: GrowingText, answer: AnswerFormat, tags: ReasoningTags) -> Parsing[bool]:
    """Reads an opening tag at the beginning, and returns whether the answer begins with reasoning."""
    start = text.keep()
    yield from text.skip(SPACES)
    tagged = yield from text.accept(tags.open)
    if not tagged:
        text.rewind(start)
    text.release()
    return tagged or answer.opened


def _parse_reasoning(text: GrowingText, answer: AnswerFormat, tags: ReasoningTags) -> Parsing[None]:
    """Reads the reasoning up to its closing tag.

    A model may draft a call there, and Qwen3.5 may call a tool without a closing tag. So a call to one of the
    request's tools waits for the tag: if none follows, the reasoning ends before the call.
    """
    marks = (tags.close, *(answer.dialect.openers if answer.dialect else ()))
    while tag := (yield from text.stream_until(marks, Reasoning)):
        if tag == tags.close:
            yield Reasoning("", text.position)  # empty reasoning stands there too
            return
        at = text.position - len(tag)
        text.rewind(at)
        if (yield from _begins_call(text, answer, tag)):
            if not (yield from text.look_for((tags.close,))):
                return
            marks = (tags.close,)
        yield from text.accept(tag)
        yield Reasoning(tag, at)


def _begins_call(text: GrowingText, answer: AnswerFormat, tag: str) -> Parsing[bool]:
    """Returns whether a tag begins a call to one of the request's tools. Reads nothing."""
    start = text.keep()
    event = None
    for event in _parse_calls(text, answer, tag, strict=True):
        if event is not None:
            break
        yield None
    text.rewind(start)
    text.release()
    return event is not None


def _try_calls(text: GrowingText, answer: AnswerFormat, tag: str, strict: bool) -> Parsing[bool]:
    """Reads a tag, the calls after it, and what separates them from others; nothing where no call begins."""
    assert answer.dialect is not None
    found = yield from text.attempt(_parse_calls(text, answer, tag, strict))
    if found:
        yield from skip_separators(text, answer.dialect.openers)
    return found


def _parse_calls(text: GrowingText, answer: AnswerFormat, tag: str, strict: bool) -> Parsing[bool]:
    """Reads a tag, which may be doubled, and the calls after it. See Dialect.parse_call."""
    assert answer.dialect is not None
    while tag and (yield from text.accept(tag)):
        yield from text.skip(SPACES)
    return (yield from answer.dialect.parse_call(text, tag, answer.tools, strict))
