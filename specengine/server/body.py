"""The base of all request bodies. It refuses unknown fields and fields that this server does not support, by name."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from specengine.server.errors import ApiError
from specengine.server.fields import make_error

Unsupported = Mapping[str, tuple[Any, ...]]  # field -> reason, then the values beside null that change nothing
MOST_NAMES = 1000  # of unknown fields that are remembered: requests choose them

logger = logging.getLogger("specengine")


class UnknownFields:
    """The context in which unknown fields are dropped. Each name is logged once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def ignore(self, name: str) -> None:
        """Logs the name of a field that is dropped."""
        name = name[:100]
        if name not in self._names and len(self._names) < MOST_NAMES:
            self._names.add(name)
            logger.warning("ignored: %r is not a field of this API (--ignore-unknown-fields)", name)


class Body(BaseModel):
    """A JSON object of the API. A field that is null counts as absent.

    unsupported: fields of the API that this server refuses, unless their value changes nothing.
    ignored: fields of the API whose values cannot change an answer.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Unsupported] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        body = {name: value for name, value in body.items() if value is not None and name not in cls.ignored}
        for name, (reason, *neutral) in cls.unsupported.items():
            value = body.pop(name, None)
            # The types are compared too, because 0 equals False.
            if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
                raise make_error(f"{name}: is not supported: {reason}")
        if info.context is not None:
            for name in body.keys() - {field.alias or name for name, field in cls.model_fields.items()}:
                info.context.ignore(name)
                del body[name]
        return body


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], text: bytes, unknown: UnknownFields | None) -> AnyBody:
    """Reads a body.  unknown: drops unknown fields; None: they are refused.

    Raises ApiError; its `param` is the path of the field at fault.
    """
    try:
        return kind.model_validate(json.loads(text), context=unknown)
    except ValidationError as error:
        raise _make_error(error.errors(include_url=False, include_context=False, include_input=False)[0]) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "body: is not JSON", code="json_invalid") from error


def _make_error(first: Any) -> ApiError:
    """Converts one of pydantic's errors."""
    path = [*first["loc"]]
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        message = "is not a field of this API"
    if first["type"] == "model_type":
        message = "expected a JSON object"
    named = re.match(r"([\w.\[\]]+): ", message) if first["type"] == "request" else None
    if named:  # the message names a field of the body
        path = [*path, named[1]]
        message = message[named.end() :]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return ApiError(400, f"{field or 'body'}: {message}", param=field or None, code=first["type"])
