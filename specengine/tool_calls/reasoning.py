"""The tags between which models reason before they answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around the reasoning."""

    name: str
    open: str
    close: str

    def opened_by(self, prompt: str, message: str = "") -> bool:
        """Returns whether a prompt ends after an open tag, so that the model continues with reasoning.

        message: the beginning of the answer, where the prompt ends with one; its reasoning may be open.
        """
        if self.open in message:
            return self.close not in message.rpartition(self.open)[2]
        _, tag, tail = prompt.rpartition(self.open)
        return bool(tag) and not tail.strip()


THINK = ReasoningTags("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningTags("mistral", "[THINK]", "[/THINK]")
REASONING = {tags.name: tags for tags in (THINK, MISTRAL_THINK)}


def detect_reasoning(template: str) -> ReasoningTags | None:
    """Returns the reasoning tags of a chat template, or None if it has none."""
    return next((tags for tags in REASONING.values() if tags.close in template), None)
