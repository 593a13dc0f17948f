"""Result files: JSON, and bytes that are written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specengine.utils.atomic_file import atomic_file


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes results as a JSON file, whole or not at all. Raises OSError."""
    write_whole(path, (_encode(data) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file in one step; a kill at any moment leaves the old file. Raises OSError."""
    with atomic_file(path) as part:
        part.write_bytes(content)


def _encode(data: dict[str, Any]) -> str:
    """Returns JSON with a line per entry; a list of dictionaries has a line for each."""
    return "{" + ",".join(f"\n  {json.dumps(str(key))}: {_value(value)}" for key, value in data.items()) + "\n}"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
        return "[" + ",".join(f"\n    {json.dumps(each)}" for each in value) + "\n  ]"
    return json.dumps(value)
