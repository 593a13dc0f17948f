"""Reads recorded results. A file is untrusted, so every field is checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specengine.types import PHASES

MOST_BYTES = 64 << 20
MOST_RUNS = 2000
_LONGEST = 10_000  # characters of a text
_SHOWN = 100  # characters of a name
_NEEDED = object()
_EXPECTED = "results of python -m specengine.bench --json"

Check = Callable[[Any], bool]
Fields = Mapping[str, tuple[Check, str, Any]]  # by key: the check, the expected value in words, the default


def read_results(path: Path) -> dict[str, Any]:
    """Returns the known fields of a results file, with defaults for fields that older files lack.

    Raises FileNotFoundError, or ValueError naming the file, the place in it and the expected value.
    """
    if not path.is_file():
        raise FileNotFoundError(f"results: no such file {str(path)!r}")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: expected {_EXPECTED}, at most {MOST_BYTES >> 20} MiB")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {_EXPECTED}, not valid JSON: {error}") from None
    if not isinstance(data, dict) or "runs" not in data:
        raise ValueError(f"{path}: expected {_EXPECTED}: an object with `runs`")
    results = _object(str(path), data, _RESULTS)
    results["runs"] = [_object(f"{path}: runs[{i}]", run, _RUN) for i, run in enumerate(results["runs"])]
    for run in results["runs"]:
        run["label"] = run["label"] or run["peer"] or run["drafter"]
        run |= {key: _shown(run[key]) for key in ("label", "drafter", "peer", "rule", "family") if run[key]}
        run["by_class"] = {_shown(name): each for name, each in run["by_class"].items()}
    results["rows"] = [_object(f"{path}: rows[{i}]", row, _ROW) for i, row in enumerate(results["rows"])]
    results["model"] = _shown(results["model"])
    for part, fields in (("machine", _MACHINE), ("example", _EXAMPLE)):
        results[part] = _object(f"{path}: {part}", results[part] or {}, fields)
    results["preset"] = _preset(f"{path}: preset", results["preset"]) if results["preset"] else None
    return results


def _preset(where: str, value: Any) -> dict[str, Any]:
    preset = _object(where, value, _PRESET)
    preset["rows"] = [_object(f"{where}.rows[{i}]", row, _PAIR) for i, row in enumerate(preset["rows"])]
    for i, row in enumerate(preset["rows"]):
        for side in ("published", "measured"):
            row[side] = _object(f"{where}.rows[{i}].{side}", row[side] or {}, _SIDE)
    return preset


def _shown(text: str) -> str:
    """Returns a name that fits a picture: shortened, and without unprintable characters."""
    text = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "\u2026"


def _object(where: str, value: Any, fields: Fields) -> dict[str, Any]:
    """Returns the known fields of an object. Raises ValueError for a missing or invalid field."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {str(value)[:40]!r}")
    out = {}
    for key, (check, expected, default) in fields.items():
        if key not in value and default is _NEEDED:
            raise ValueError(f"{where}: expected {_EXPECTED}, {key!r} is missing")
        out[key] = value.get(key, default)
        if key in value and not check(out[key]):
            raise ValueError(f"{where}.{key}: expected {expected}, got {str(out[key])[:40]!r}")
    return out


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e12 < value < 1e12


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _positive(value: Any) -> bool:
    return _number(value) and 0 < value < 1e9


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value) and value >= 0


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check, most: int = 10_000) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _by_name(check: Check, most: int = 1000) -> Check:
    def checked(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and len(value) <= most
            and all(map(_text, value))
            and all(map(check, value.values()))
        )

    return checked


def _piece(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_text, value))


def _phases(value: Any) -> bool:
    return isinstance(value, dict) and set(PHASES) <= set(value) and all(_number(ms) for ms in value.values())


def _has_speedup(value: Any) -> bool:
    return isinstance(value, dict) and _positive(value.get("speedup"))


_TEXT = (_maybe(_text), "a text", "")
_MAYBE = (_maybe(_number), "a number or null", None)
_RESULTS: Fields = {
    "model": (_text, "a text", _NEEDED),
    "questions": (_count, "a number of questions", _NEEDED),
    "max_new_tokens": (_count, "a number of tokens", _NEEDED),
    "runs": (lambda value: _list(lambda _: True, MOST_RUNS)(value) and bool(value), "a list of runs", _NEEDED),
    "rows": (_list(lambda _: True), "a list", []),
    "machine": (_maybe(lambda value: isinstance(value, dict)), "an object", None),
    "example": (_maybe(lambda value: isinstance(value, dict)), "an object", None),
    "preset": (_maybe(lambda value: isinstance(value, dict)), "an object or null", None),
    **dict.fromkeys(("command", "commit", "dtype", "device", "questions_file"), _TEXT),
}
_RUN: Fields = {
    "drafter": (_text, "a text", _NEEDED),
    "batch": (lambda value: _count(value) and value > 0, "a batch size", _NEEDED),
    "temperature": (_number, "a number", _NEEDED),
    "tokens_per_second": (_positive, "a positive number", _NEEDED),
    "speedup": (_positive, "a positive number", _NEEDED),
    "peer": (_maybe(_text), "a text or null", None),
    "rule": (_text, "a text", "match"),
    "label": _TEXT,
    "identical": _TEXT,
    "family": _TEXT,
    "tau": (_maybe(_positive), "a positive number or null", None),
    "level_acceptance": (_list(_maybe(_share)), "a list of shares", []),
    "level_cycles": (_list(_count), "a list of numbers of cycles", []),
    "ms_per_cycle": (_maybe(_phases), "milliseconds by phase", None),
    "by_class": (_by_name(_has_speedup), "a speedup by class", {}),
    "token_gap_ms": (_by_name(_maybe(_number)), "milliseconds by percentile", {}),
    **dict.fromkeys(
        ("agreement", "log_likelihood", "relaxed", "first_token_ms", "floor_fraction", "peak_memory_bytes"), _MAYBE
    ),
}
_ROW: Fields = {
    "rows": (lambda value: _count(value) and value > 0, "a number of rows", _NEEDED),
    "ms": (_positive, "a positive number", _NEEDED),
}
_MACHINE: Fields = {"cpu": _TEXT, "gpu": _TEXT, "cores": (_maybe(_count), "a number of cores", None)}
_ANY = (lambda value: True, "", None)
_PRESET: Fields = {"name": _TEXT, "about": _TEXT, "rows": (_list(lambda _: True, MOST_RUNS), "a list", [])}
_PAIR: Fields = {"method": _TEXT, "published": _ANY, "measured": _ANY}
_SIDE: Fields = {
    **dict.fromkeys(("model", "task", "label", "rule", "quality", "note"), _TEXT),
    **dict.fromkeys(("temperature", "batch", "tau", "efficiency", "log_likelihood", "agreement"), _MAYBE),
    "speedup": (lambda value: _maybe(_number)(value) or _list(_number, 2)(value), "a number or a range", None),
}
_EXAMPLE: Fields = {
    "question": _TEXT,
    "tokens": (_by_name(_list(_piece)), "pairs of text and source by drafter", {}),
}
