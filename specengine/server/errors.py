"""Errors in the form that OpenAI clients read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from specengine.types import CONSTRAINTS

RETRY_AFTER = 1  # seconds; a slot is free as soon as another text ends

# The API's names of fields that the engine calls otherwise.
_API_FIELDS = {
    "drafter": "speculation.drafter",
    "rule": "speculation.rule",
}


class JsonResponse(Response):
    """Writes ASCII only: a text may hold an unpaired surrogate, which UTF-8 cannot encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


class ApiError(Exception):
    """An error response.  param: the field at fault.  code: identifies the error to programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JsonResponse:
        return JsonResponse(self.body, self.status, self.headers)


def make_retryable_error(status: int, message: str, code: str) -> ApiError:
    """Makes the error of a request that was refused before any work. The client may send it again later."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER)})


def make_field_error(error: ValueError, prompt_field: str, constraint_field: str | None = None) -> ApiError:
    """Converts a ValueError of the engine, whose message begins with the name of the argument at fault.

    prompt_field, constraint_field: the API's fields for the prompt, and for its constraint.
    """
    named = re.match(r"(\w+)(?:\[[^]]*\])*: ", str(error))
    name = named[1] if named else None
    param = prompt_field if name in ("prompt", "prompts") else _API_FIELDS.get(name or "", name)
    if constraint_field and name in CONSTRAINTS:
        return ApiError(400, f"{constraint_field}: {str(error).partition(': ')[2]}", param=constraint_field)
    return ApiError(400, str(error), param=param)
