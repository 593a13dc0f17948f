"""Leaves the last message of a chat open, so that the model continues it. transformers does it in the same way."""

from __future__ import annotations

from typing import Any

TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def tag_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks the end of the last message's content."""
    *others, last = messages
    return [*others, {**last, "content": last["content"] + TAG}]


def cut_at_tag(text: str, content: str) -> str:
    """Returns a rendered chat up to the tag.  content: of the last message.

    Where a template trims contents, trailing space goes too. Raises ValueError for a template that changes the content.
    """
    place = text.rfind(TAG.strip())
    if place < 0 or content.strip() not in text:
        raise ValueError("continue_final_message: the template does not write the last message as it is")
    return text[:place] if text.startswith(TAG, place) else text[:place].rstrip()
