"""The requests of /v1/chat/completions."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from specengine.server.body import Body, Unsupported
from specengine.server.chat.tools import Tool, ToolCall, ToolChoice
from specengine.server.fields import Count, Integer, Text, make_error
from specengine.server.schema import GenerationRequest

_FUNCTIONS = "tools replace functions"
_TEXT = "this server reads and writes plain text"


class Message(Body):
    """A message. Only an assistant has calls, reasoning and a refusal; only a tool has an id."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Text | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "cache_control"})
    unsupported: ClassVar[Unsupported] = {
        "audio": (_TEXT,),
        "function_call": (_FUNCTIONS,),
    }
    of_roles: ClassVar[dict[str, str]] = {
        "tool_calls": "assistant",
        "reasoning_content": "assistant",
        "reasoning": "assistant",
        "tool_call_id": "tool",
        "refusal": "assistant",
    }

    @model_validator(mode="before")
    @classmethod
    def _check_role(cls, message: Any) -> Any:
        if isinstance(message, dict) and message.get("role") == "function":
            raise make_error(f"role 'function' is not supported: {_FUNCTIONS}")
        return message

    @model_validator(mode="after")
    def _check_fields(self) -> Message:
        for name, role in self.of_roles.items():
            if getattr(self, name) and self.role != role:
                raise make_error(f"{name}: is a field of the role {role!r}, this message has {self.role!r}")
        if self.role == "tool" and not self.tool_call_id:
            raise make_error("tool_call_id: is missing; a message of a tool answers a call")
        if self.content is None and not (self.tool_calls or self.reasoning_content or self.reasoning or self.refusal):
            raise make_error("content: is missing")
        return self

    @property
    def template_message(self) -> dict[str, Any]:
        """The message as chat templates take it. Templates spell the reasoning in two ways, so both are given."""
        role = "system" if self.role == "developer" else self.role  # the API renamed `system` to `developer`
        message: dict[str, Any] = {"role": role, "content": self.content or self.refusal or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.template_call for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self.name:
            message["name"] = self.name
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer | None, Field(ge=0, le=20)] = None
    max_completion_tokens: Count = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    unsupported: ClassVar[Unsupported] = {
        **GenerationRequest.unsupported,
        "audio": (_TEXT,),
        "function_call": (_FUNCTIONS, "none", "auto"),
        "functions": (_FUNCTIONS, []),
        "modalities": (_TEXT, ["text"]),
        "moderation": ("this server does not moderate texts",),
        "verbosity": ("ask the model for it in the prompt", "medium"),
        "web_search_options": ("this server searches nothing",),
    }
    prompt_field: ClassVar[str] = "messages"

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise make_error("top_logprobs: needs logprobs: true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise make_error("max_tokens: differs from max_completion_tokens, its newer name")
        self._check_tools()
        self._check_constraint()
        self._check_answered_calls()
        if self.continue_final_message and self.add_generation_prompt:
            raise make_error("continue_final_message: excludes add_generation_prompt")
        if self.continue_final_message and self.messages[-1].content is None:
            raise make_error("continue_final_message: the last message has no content")
        return self

    def _check_tools(self) -> None:
        names: dict[str, None] = {}
        for number, tool in enumerate(self.tools or ()):
            name = tool.function.name
            if name in names:
                raise make_error(f"tools[{number}].function.name: {name!r} is the name of two tools")
            names[name] = None
        without = (None, "none") if self.tools is None else (None, "none", "auto")
        if not names and self.tool_choice not in without:
            raise make_error("tool_choice: needs tools")
        if self.tools is None and self.parallel_tool_calls:
            raise make_error("parallel_tool_calls: needs tools")
        if isinstance(self.tool_choice, tuple) and self.tool_choice[0] not in names:
            known = ", ".join(islice(names, 20))
            raise make_error(f"tool_choice: expected a tool's name such as {known}, got {self.tool_choice[0][:100]!r}")

    def _check_constraint(self) -> None:
        constraint = self.constraint
        if constraint and isinstance(self.tool_choice, tuple) and not constraint.field.startswith("response_format"):
            raise make_error(f"tool_choice: a named function excludes {constraint.field}")

    def _check_answered_calls(self) -> None:
        """Raises an error for the answer of a tool that no assistant has called. Gives answers their tool's name."""
        called: dict[str, str] = {}
        for number, message in enumerate(self.messages):
            called |= {call.id: call.function.name for call in message.tool_calls}
            if message.role == "tool":
                if message.tool_call_id not in called:
                    raise make_error(
                        f"messages[{number}].tool_call_id: no earlier message calls {message.tool_call_id!r:.100}"
                    )
                message.name = message.name or called[message.tool_call_id]

    @property
    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def requested_tokens_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def constraint_field(self) -> str | None:
        must_call = self.tools and (self.tool_choice == "required" or isinstance(self.tool_choice, tuple))
        if not must_call and self.constraint is not None:
            return self.constraint.field
        return "tools" if self.tools else None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else (self.tools or [])

    @property
    def open_message(self) -> str:
        """The text that the answer continues."""
        return (self.messages[-1].content or "") if self.continue_final_message else ""

    @property
    def prompts(self) -> list[Any]:
        return [self.messages]
