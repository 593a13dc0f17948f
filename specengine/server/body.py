"""The base of all request bodies. It refuses unknown fields and fields that this server does not support, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from specengine.server.errors import ApiError
from specengine.server.fields import make_error

Unsupported = Mapping[str, tuple[Any, ...]]  # field -> reason, then the values beside null that change nothing


class Body(BaseModel):
    """A JSON object of the API. A field that is null counts as absent.

    unsupported: fields of the API that this server refuses, unless their value changes nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Unsupported] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, (reason, *neutral) in cls.unsupported.items():
            value = body.get(name)
            # The types are compared too, because 0 equals False.
            if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
                raise make_error(f"{name}: is not supported: {reason}")
        absent = {name for name in cls.model_fields if body.get(name) is None}
        return {name: value for name, value in body.items() if name not in cls.unsupported and name not in absent}


def make_body_error(errors: list[Any]) -> ApiError:
    """Converts the first of pydantic's errors; `param` is the path of the field."""
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    message = first["msg"]
    if first["type"] == "json_invalid":
        return ApiError(400, "body: is not JSON", code="json_invalid")
    if first["type"] == "extra_forbidden":
        message = "is not a field of this API"
    named = re.match(r"([\w.\[\]]+): ", message) if first["type"] == "request" else None
    if named:  # the message names a field of the body
        path = [*path, named[1]]
        message = message[named.end() :]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return ApiError(400, f"{field or 'body'}: {message}", param=field or None, code=first["type"])
