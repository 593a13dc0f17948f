"""The JSON objects that lie beside weights: configurations and vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # Python's objects may be thirty times as large


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError for a missing file, ValueError naming one that holds no JSON object."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: expected at most {MOST_BYTES >> 20} MiB of JSON")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
