"""Files that are there whole or not at all: a kill at any moment leaves the one before."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives the path to write to, which is put in place at the end; makes the folder.

    Raises OSError naming `path` for a disk that is full, and whatever else keeps a file from being written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        part.chmod(0o644)  # safetensors makes files for their owner alone
        with part.open("rb") as file:
            os.fsync(file.fileno())  # else the rename may reach the disk before the content
        os.replace(part, path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # of a write, which knows no name
    except (SafetensorError, RuntimeError) as error:  # what these and torch.save make of an OSError
        raise OSError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        part.unlink(missing_ok=True)
