"""Builds and imports `_sim`, the CUDA kernels on the execution simulator (tests/simulator/csrc/sim)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import pybind11
from filelock import FileLock

from tests.packaging.build_scripts import loaded

ROOT = Path(__file__).resolve().parents[2]
build_cache = loaded("build_cache")


@cache
def simulator() -> ModuleType:
    """Brings the module up to date with the sources and imports it. Raises RuntimeError with the compiler's message.

    A module that another clone has built of the same sources comes from the build cache.
    """
    folder = _build_folder()
    path, key, built = folder / f"_sim{sysconfig.get_config_var('EXT_SUFFIX')}", _key(), folder / "key"
    with FileLock(folder / "lock"):
        if not path.exists() or not built.exists() or built.read_text() != key:
            kept = build_cache.cache_folder()
            build_cache.build_or_fetch(kept and kept / "sim", _key, path, lambda: _build(folder))
            built.write_text(key)
    spec = importlib.util.spec_from_file_location("_sim", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_folder() -> Path:
    """A folder per clone, compiler and Python, in the user's cache if the clone cannot be written."""
    name = "sim-" + hashlib.sha256(repr([ROOT, sys.executable, *_facts()]).encode()).hexdigest()[:12]
    for parent in (ROOT / "build", Path("~/.cache/specengine").expanduser()):
        try:
            (parent / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK):
            return parent / name
    raise RuntimeError("the simulator's build finds no folder that can be written")


def _key() -> str:
    sources = sorted(path for path in (ROOT / "tests/simulator/csrc").rglob("*") if path.is_file())
    own = [f"{path.relative_to(ROOT)} {path.read_text()}" for path in sources]
    return build_cache.core_key(ROOT, [*_facts(), *own])


@cache
def _facts() -> list[str]:
    """What decides beside the sources and the environment what is built."""
    version = subprocess.run([_compiler() or "false", "--version"], capture_output=True, text=True).stdout
    return [sys.version, pybind11.__version__, str(_compiler()), version]


def _compiler() -> str | None:
    """g++ even where CXX names another: only g++ instruments the kernels as the simulator needs it."""
    named = os.environ.get("CXX", "")
    return named if "g++" in Path(named).name else shutil.which("g++")


def _build(folder: Path) -> None:
    # Tools installed beside this Python are found though its folder is not on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake, ninja = (shutil.which(tool, path=path) for tool in ("cmake", "ninja"))
    if cmake is None or ninja is None or _compiler() is None:
        raise RuntimeError("the simulator's build needs cmake, ninja and g++")
    if not (folder / "build.ninja").exists():
        _run(
            *[cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"],
            *["-DSPECENGINE_SIM=ON", f"-DCMAKE_CXX_COMPILER={_compiler()}", f"-DPython_EXECUTABLE={sys.executable}"],
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        )
    _run(cmake, "--build", str(folder))


def _run(*command: str) -> None:
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode:
        raise RuntimeError(f"the simulator's build failed: {' '.join(command)}\n{result.stdout}")
