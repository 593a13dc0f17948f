"""Files that are replaced as a whole: a kill at any moment leaves the old file."""

from __future__ import annotations

import os
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
