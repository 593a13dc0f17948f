"""What an answer may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specengine.tool_calls.dialects import Dialect
from specengine.tool_calls.reasoning import ReasoningTags


@dataclass(frozen=True)
class AnswerFormat:
    """Says what an answer may hold.

    dialect: None finds no calls.  tools: the JSON schema of each function's parameters, by name.
    reasoning: None finds no reasoning.  opened: the prompt has opened the reasoning.
    is_constrained: the answer is calls or a text of a constraint, so tags in such a text are text.
    """

    dialect: Dialect | None = None
    tools: Mapping[str, Any] = field(default_factory=dict)
    reasoning: ReasoningTags | None = None
    opened: bool = False
    is_constrained: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the whole text is content."""
        return self.dialect is None and self.reasoning is None

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the parser must see, which may be special tokens."""
        own = self.dialect.markers if self.dialect else ()
        return (*own, self.reasoning.open, self.reasoning.close) if self.reasoning else own
