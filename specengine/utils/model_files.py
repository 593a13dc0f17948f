"""The files of a model: which are GGUF files, the parts of a split one, and the files of a folder."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def is_gguf(path: Path) -> bool:
    """Returns whether a file is a GGUF file, by its ending or its first bytes: Ollama names files by their hash."""
    with suppress(OSError, ValueError):  # ValueError: the name holds a zero byte
        if path.is_file():
            if path.suffix.lower() == ".gguf":
                return True
            with path.open("rb") as file:
                return file.read(4) == b"GGUF"
    return False


def gguf_parts(path: Path) -> list[Path]:
    """Lists all parts of a model, in order, by the path of any of them: NAME-00001-of-00002.gguf. Others have one."""
    named = _PART.fullmatch(path.name)
    if named is None or not 1 <= int(named[2]) <= int(named[3]):
        return [path]
    stem, _, count, ending = named.groups()
    return [path.with_name(f"{stem}-{number:05}-of-{count}{ending}") for number in range(1, int(count) + 1)]


def model_files(path: Path) -> list[Path]:
    """Lists the entries of a folder, or the parts of a file, in order. Raises OSError for an unreadable folder."""
    return sorted(path.iterdir()) if path.is_dir() else gguf_parts(path)
