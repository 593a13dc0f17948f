"""Measurements in the cache folder: one JSON file for each machine and setting."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from specengine.utils.atomic_file import atomic_file
from specengine.utils.cache_dir import cache_dir
from specengine.utils.model_files import model_files


def measurement_path(kind: str, place: Any) -> Path | None:
    """Returns the file of one kind of measurement, or None without a cache folder.

    place: machine and setting, as plain JSON values.
    """
    with contextlib.suppress(RuntimeError):  # no home folder
        if folder := cache_dir():
            return folder / kind / f"{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:16]}.json"
    return None


def read_measurement(path: Path | None, key: Any) -> dict[str, Any] | None:
    """Returns a stored measurement, or None if it is missing, damaged or has another key."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        data = json.loads(path.read_text(encoding="utf-8")) if path else {}
        if data["key"] == key:
            return data
    return None


def write_measurement(path: Path | None, key: Any, data: dict[str, Any]) -> None:
    """Stores a measurement. A write error is ignored: the next process then measures again."""
    if path is None:
        return
    with contextlib.suppress(OSError), atomic_file(path) as part:
        part.write_text(json.dumps({"key": key, **data}), encoding="utf-8")


def file_stamps(path: Path) -> list[list[Any]]:
    """Returns name, size in bytes and time of change in ns of a file, of all parts of a split model, or of every file
    in a folder.

    Returns [] where there is neither. The stamps are plain JSON values, to be part of a key.
    """
    with contextlib.suppress(OSError):
        stats = [(file.name, file.stat()) for file in model_files(path) if file.is_file()]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return []
