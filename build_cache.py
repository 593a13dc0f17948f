"""Keeps compiled cores in the user's cache folder, each under a hash of everything that decides what is compiled.

SPECENGINE_BUILD_CACHE=0 turns the cache off, and so does SPECENGINE_CACHE=off.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

KEPT = 4  # cores; one is 2 MB without CUDA, 20 MB with it
SCRIPTS = ("CMakeLists.txt", "setup.py", "cuda_choice.py")  # which decide what is compiled, and how
VARIABLES = (
    *("CC", "CXX", "CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
    *("CUDACXX", "CUDAFLAGS", "CUDAHOSTCXX", "CUDAARCHS", "CUDA_PATH", "CUDA_HOME", "CUDAToolkit_ROOT"),
    *("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
)


def user_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder of everything that is cached for this user; None without a home folder."""
    chosen = environment.get("SPECENGINE_CACHE")
    try:
        if chosen:
            return None if chosen == "off" else Path(chosen).expanduser()
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specengine"
    except RuntimeError:
        return None


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder of the cached cores; None where the cache is turned off or there is no home folder."""
    # Code for the CPU at hand must not reach another machine that shares the home folder.
    native = any("native" in value for value in build_variables(environment).values())
    folder = user_folder(environment)
    if environment.get("SPECENGINE_BUILD_CACHE") == "0" or native or folder is None:
        return None
    return folder / "build"


def build_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Selects the environment variables that CMake and the compilers read."""
    return {name: environment[name] for name in sorted(environment) if name in VARIABLES or name.startswith("CMAKE_")}


def versions(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Lists Python's ABI, the C library's version and the version of every compiler that CMake may choose."""
    found = [sysconfig.get_config_var("EXT_SUFFIX") or sys.version, platform.machine(), *platform.libc_ver()]
    cuda = environment.get("CUDA_PATH", "/usr/local/cuda")
    for compiler in (environment.get("CXX"), "c++", "g++", environment.get("CUDACXX"), "nvcc", f"{cuda}/bin/nvcc"):
        command = compiler and shutil.which(compiler.split()[0])
        if command:
            done = subprocess.run([command, "--version"], capture_output=True, text=True)
            found.append(f"{compiler}: {done.stdout}")
    return found


def core_key(root: Path, facts: Iterable[str], environment: Mapping[str, str] = os.environ) -> str:
    """Hashes the sources below `root`, the build's environment and further facts, for instance `versions()`."""
    key = hashlib.sha256()
    sources = sorted(path for path in (root / "csrc").rglob("*") if path.is_file())
    for path in (*sources, *(root / name for name in SCRIPTS)):
        content = path.read_bytes()
        key.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    for text in (*facts, *map(repr, build_variables(environment).items())):
        key.update(f"{len(text)}\0{text}".encode())
    return key.hexdigest()


def place(core: Path, target: Path) -> None:
    """Copies a core in one step: a process that has mapped the old file keeps it, a reader never sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=target.parent, suffix=".part")
    os.close(descriptor)
    try:
        shutil.copyfile(core, part)
        shutil.copymode(core, part)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise


def build_or_fetch(folder: Path | None, make_key: Callable[[], str], target: Path, build: Callable[[], object]) -> bool:
    """Puts the core of the present sources into the file `target`. Returns True where it came from `folder`.

    Otherwise `build` writes the file. An unusable folder and a damaged file in it cost a build and nothing else.
    """
    key = make_key()
    if folder and (cached := lookup(folder, key)):
        try:
            place(cached, target)
            os.utime(cached)
            return True
        except OSError:
            pass
    build()
    if folder and make_key() == key:  # a source that was edited during the build belongs to another key
        try:
            place(target, folder / f"{key}-{digest(target)}.so")
            for old in sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            print(f"specengine: the core is not cached in {folder}: {error}")
    return False


def lookup(folder: Path, key: str) -> Path | None:
    """Finds an undamaged core of `key` that a process of the same user has stored."""
    try:
        for path in folder.glob(f"{key}-*.so"):
            own = not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()
            if own and path.name == f"{key}-{digest(path)}.so":
                return path
    except OSError:
        pass
    return None


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
