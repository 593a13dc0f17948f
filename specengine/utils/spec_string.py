"""Specs such as `prompt_lookup,nodes=16` or `eagle3:PATH,depth=7`: a name, a path, and options."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


@dataclass(frozen=True)
class Spec:
    """The parts of `NAME[:PATH][,option=value...]`."""

    name: str
    path: str | None
    options: dict[str, str]

    @staticmethod
    def parse(text: str, argument: str) -> Spec:
        """Parses a spec. Raises ValueError naming `argument` for any other form."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{argument}: expected NAME[:PATH][,option=value...], got {text!r}")
        head, *pairs = text.split(",")
        name, _, path = head.strip().partition(":")
        options: dict[str, str] = {}
        for pair in pairs:
            key, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or not key or not value:
                raise ValueError(f"{argument}: expected option=value, got {pair!r} in {text!r}")
            if key in options:
                raise ValueError(f"{argument}: option {key!r} is given twice in {text!r}")
            options[key] = value
        return Spec(name, path or None, options)

    def __str__(self) -> str:
        head = self.name if self.path is None else f"{self.name}:{self.path}"
        return ",".join([head, *(f"{key}={value}" for key, value in self.options.items())])

    def build(self, config: type[C], argument: str) -> C:
        """Builds a config dataclass from the options; the dataclass checks their ranges.

        Raises ValueError naming `argument` for an unknown option or a bad value.
        """
        kinds = typing.get_type_hints(config)
        fields = {field.name for field in dataclasses.fields(config)}
        unknown = sorted(set(self.options) - fields)
        if unknown:
            expected = ", ".join(sorted(fields)) or "none"
            raise ValueError(f"{argument}: {self.name} has no option {unknown[0]!r}; its options: {expected}")
        values = {key: _convert(f"{argument}: {key}", value, kinds[key]) for key, value in self.options.items()}
        try:
            return config(**values)
        except ValueError as error:
            raise ValueError(f"{argument}: {self.name}: {error}") from error


def _convert(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name}: expected true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{name}: expected {kind.__name__}, got {text!r}") from error


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raises ValueError naming `name` unless `value` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}, got {value!r}")


def parse_named_paths(option: str, pairs: Iterable[str | None]) -> dict[str, str]:
    """Parses `NAME=PATH` pairs; None is left out. Raises ValueError for any other form and for a repeated name."""
    paths: dict[str, str] = {}
    for pair in pairs:
        if pair is None:
            continue
        name, _, path = pair.partition("=")
        if not name or not path:
            raise ValueError(f"{option}: expected NAME=PATH, got {pair!r}")
        if name in paths:
            raise ValueError(f"{option}: {name!r} is given twice")
        paths[name] = path
    return paths
