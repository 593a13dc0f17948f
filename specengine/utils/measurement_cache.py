"""Measurements kept in the cache folder: one JSON file per place they were made in."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from specengine.utils.atomic_file import atomic_file
from specengine.utils.cache_dir import cache_dir


def measurement_path(kind: str, place: Any) -> Path | None:
    """The file of a kind of measurement for a place (plain JSON values); None if there is no cache folder."""
    with contextlib.suppress(RuntimeError):  # no home folder
        return cache_dir() / kind / f"{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:16]}.json"
    return None


def read_measurement(path: Path | None, key: Any) -> dict[str, Any] | None:
    """What write_measurement put there, or None if it is missing, damaged or made under another key."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        data = json.loads(path.read_text(encoding="utf-8")) if path else {}
        if data["key"] == key:
            return data
    return None


def write_measurement(path: Path | None, key: Any, data: dict[str, Any]) -> None:
    """Puts the file in place at once; a folder that cannot be written only means measuring again."""
    if path is None:
        return
    with contextlib.suppress(OSError), atomic_file(path) as part:
        part.write_text(json.dumps({"key": key, **data}), encoding="utf-8")
