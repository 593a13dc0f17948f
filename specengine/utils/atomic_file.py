"""Files and folders that are replaced as a whole: a kill at any moment leaves the old file."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder and renames it to `path` at the end; creates the folder.

    Raises OSError naming `path` if the file cannot be written, for example on a full disk.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        part.chmod(0o644)  # safetensors creates files that only their owner can read
        with part.open("rb") as file:
            os.fsync(file.fileno())  # else the rename may reach the disk before the content
        os.replace(part, path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # write() does not set a file name
    except (SafetensorError, RuntimeError) as error:  # safetensors and torch.save hide an OSError in these
        raise OSError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a new temporary folder beside `path` and renames it to `path` at the end.

    A folder that it replaces is first renamed with the ending .old, and removed last.

    Raises OSError if the folder cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    old = part.with_name(f"{part.name}.old")
    part.mkdir(parents=True)
    try:
        yield part
        for each in part.iterdir():
            with each.open("rb") as file:
                os.fsync(file.fileno())
        if path.exists():
            path.rename(old)  # a folder that is not empty cannot be replaced in one step
        part.rename(path)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
