"""How a server uses its model's chat template: tools, reasoning, and the dialect of calls."""

from __future__ import annotations

from typing import Any

from specengine.server.chat.schema import ChatRequest
from specengine.server.errors import ApiError
from specengine.server.settings import Settings
from specengine.tokenizer import Tokenizer
from specengine.tool_calls.answer_parser import AnswerFormat
from specengine.tool_calls.dialects import DIALECTS, HERMES, Dialect, detect_dialect
from specengine.tool_calls.fallback_prompt import write_tools_as_text
from specengine.tool_calls.reasoning import REASONING, ReasoningTags, detect_reasoning

# Variables that the server sets itself.
_OWN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
_TAIL = 16  # tokens of a prompt's end; an opening tag has at most seven where it is no token of its own


class TemplateUse:
    """Makes the template's arguments for requests, and says what their answers may hold.

    A template that does not read `tools` gets them as text, in the Hermes dialect.
    Raises ValueError naming the setting if such a template is to have another dialect.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Settings) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        text = template.text if template else ""
        self._reads = template.reads if template else frozenset[str]()
        unread = template is None and tokenizer.has_chat_template  # it is not valid, which stops chats alone
        self._dialect = _choose_dialect(settings.tool_dialect, text, unread or "tools" in self._reads)
        self._reasoning = _choose_reasoning(settings.reasoning, text)
        # Grammars name these tokens, and parsers must see those that are special.
        added = {text: (token, special) for token, (text, special) in tokenizer.added_tokens.items()}
        self.tag_tokens = {
            text: token
            for text, (token, special) in added.items()
            if special or (text.startswith("<") and text.endswith(">"))
        }
        self._special = {text for text, (_, special) in added.items() if special}

    def messages(self, body: ChatRequest) -> list[dict[str, Any]]:
        """Returns the conversation as the template takes it."""
        messages = [message.template_message for message in body.messages]
        if "tools" in self._reads:
            return messages
        uses_tools = body.offered_tools or any("tool_calls" in each or each["role"] == "tool" for each in messages)
        tools = [tool.template_tool for tool in body.offered_tools]
        return write_tools_as_text(messages, tools) if uses_tools else messages

    def arguments(self, body: ChatRequest) -> dict[str, Any]:
        """Returns the template's other arguments. Raises ApiError for one that the template does not read."""
        variables = dict(body.chat_template_kwargs)
        for name in variables:
            if name in _OWN or name not in self._reads:
                message = f"chat_template_kwargs.{name[:100]}: the model's chat template has no such variable"
                raise ApiError(400, message, param="chat_template_kwargs")
        variables |= self._effort(body)
        tools = [tool.template_tool for tool in body.offered_tools] if "tools" in self._reads else []
        opens = body.continue_final_message or False
        new_turn = not opens if body.add_generation_prompt is None else body.add_generation_prompt
        prompt = {"add_generation_prompt": new_turn, "continue_final_message": opens}
        return {"tools": tools or None, "variables": variables, **prompt}

    def answer_format(self, body: ChatRequest, prompt: list[int]) -> AnswerFormat:
        """Returns what an answer may hold.  prompt: token ids. Raises ApiError for tools in an unknown dialect."""
        offered = body.offered_tools
        if offered and self._dialect is None:
            message = "tools: the dialect of the model's calls is unknown; the option --tool-dialect chooses one"
            raise ApiError(400, message, param="tools")
        end = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False) if self._reasoning else ""
        return AnswerFormat(
            dialect=self._dialect if offered else None,
            tools={tool.function.name: tool.function.parameters for tool in offered},
            reasoning=self._reasoning,
            opened=bool(self._reasoning and self._reasoning.opened_by(end, body.open_message)),
            is_constrained=body.constraint is not None,
        )

    def reads_special_tokens(self, answer: AnswerFormat) -> bool:
        """Returns whether a tag of an answer is a special token, which the text must then show."""
        return bool(self._special.intersection(answer.markers))

    def _effort(self, body: ChatRequest) -> dict[str, Any]:
        effort = body.reasoning_effort
        if effort is None:
            return {}
        if "reasoning_effort" in self._reads:
            return {"reasoning_effort": effort}
        if effort == "none" and "enable_thinking" in self._reads:
            return {"enable_thinking": False}
        if self._reasoning is None and "enable_thinking" not in self._reads:  # the model does not reason
            return {}
        message = f"reasoning_effort: the model's chat template does not know {effort!r}"
        raise ApiError(400, message, param="reasoning_effort")


def _choose_dialect(name: str, template: str, reads_tools: bool) -> Dialect | None:
    if not reads_tools and name not in ("auto", HERMES.name):
        raise ValueError(f"tool_dialect: the chat template reads no tools, so they are written in {HERMES.name}")
    if name != "auto":
        return DIALECTS[name]
    return detect_dialect(template) if reads_tools else HERMES


def _choose_reasoning(name: str, template: str) -> ReasoningTags | None:
    if name == "auto":
        return detect_reasoning(template)
    return REASONING.get(name)  # None for `none`
