"""What goes wrong, as OpenAI's clients read it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

RETRY_AFTER = 1  # seconds; whoever is refused may find a place as soon as another text ends

# What the engine calls a field by another name than the API does.
_FIELDS = {
    "drafter": "speculation.drafter",
    "rule": "speculation.rule",
}


class Json(Response):
    """ASCII alone: a text may hold half of a surrogate pair, which is no UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


class ApiError(Exception):
    """An answer that is no text.  param: the field at fault.  code: what a program may tell it by."""

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
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Json:
        return Json(self.body, self.status, self.headers)


def refused(status: int, message: str, code: str) -> ApiError:
    """Nothing was done for the request, which may be tried again later."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER)})


def of_request(error: ValueError, prompt: str) -> ApiError:
    """A ValueError of the engine, which begins with the name of what is wrong.  prompt: the field that has it."""
    named = re.match(r"(\w+)(?:\[[^]]*\])*: ", str(error))
    name = named[1] if named else None
    param = prompt if name in ("prompt", "prompts") else _FIELDS.get(name or "", name)
    return ApiError(400, str(error), param=param)
