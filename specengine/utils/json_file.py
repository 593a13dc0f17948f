"""JSON files beside weights: configurations and vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # the Python objects of a JSON text can be thirty times as large


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises FileNotFoundError for a missing file, and ValueError naming a file that is not a JSON object.
    """
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
