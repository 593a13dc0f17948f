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


def _encode(value: Any, indent: str = "") -> str:
    """Returns JSON with a line per entry; a list without dictionaries, as of tokens, takes one line."""
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(str(key))}: {_encode(each, indent + '  ')}" for key, each in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
        entries = [_encode(each, indent + "  ") for each in value]
    else:
        return json.dumps(value)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + ",".join(f"\n{indent}  {entry}" for entry in entries) + f"\n{indent}{closing}"
