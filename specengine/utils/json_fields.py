"""Typed access to the fields of a JSON object, with errors that name the source and the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_REQUIRED: Any = object()


class Fields:
    """A mapping with typed lookups. They raise ValueError, which names the source and the field."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise ValueError(f"{where}: expected an object of fields, got {type(data).__name__}")
        self.data = data
        self.where = where

    def get(self, name: str, kind: type[T], default: Any = _REQUIRED) -> T:
        """Returns the field as `kind`; an absent or null field returns the default."""
        value = self._value(name, kind)
        if value is None:
            if default is _REQUIRED:
                raise self.error(name, "is missing")
            return default
        if kind is float and type(value) is int and abs(value) < 1 << 1000:  # the largest float is below 2^1024
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"must be of type {kind.__name__}, got {value!r}")
        return value

    def _value(self, name: str, kind: type[Any]) -> Any:
        """Finds the value of a field that is wanted as `kind`; a subclass may know other spellings."""
        return self.data.get(name)

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns a field with a token id, a list of token ids, or null, as a tuple."""
        value = self.data.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(item) is not int for item in values):
            raise self.error(name, f"must be a token id or a list of token ids, got {value!r}")
        return tuple(values)

    def error(self, name: str, problem: str) -> ValueError:
        """Makes a ValueError that names the source and the field."""
        return ValueError(f"{self.where}: field '{name}' {problem}")

    def build(self, factory: Callable[..., T], **values: Any) -> T:
        """Calls a configuration class; its ValueError gains the name of the source."""
        try:
            return factory(**values)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None
