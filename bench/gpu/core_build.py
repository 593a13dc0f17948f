"""Says what the machine has, and builds the core beside the sources: python bench/gpu/core_build.py JSON [--dry]

Needs no network. A build that fails, or whose core has no kernels for a GPU, leaves the core as it was.
--dry configures the same build and checks which core it would write, but compiles nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "specengine" / "_C"
CORE = FOLDER / f"__init__{sysconfig.get_config_var('EXT_SUFFIX')}"  # what `import specengine._C` loads
# Loads a core without the package around it.
LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("specengine._C", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
sys.exit(0 if core.cuda_architectures else "the new core has no kernels for a GPU, as the build found no nvcc")
"""
PACKAGES = ("numpy", "transformers", "tokenizers", "safetensors", "pybind11", "pytest", "pytest-xdist", "gguf")
TOOLS = ("nvcc", "cmake", "ninja", "cuobjdump", "compute-sanitizer", "ncu", "c++")


def version(package: str) -> str:
    """Returns the version of an installed package, or `no`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "no"


def machine() -> dict[str, str]:
    """Returns versions, tools, and the GPU or `no`."""
    import torch  # here: the run goes on without it

    facts = {"python": platform.python_version(), "torch": torch.__version__, "its CUDA": str(torch.version.cuda)}
    facts["GPU"] = "no"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        facts["GPU"] = f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, {memory}"
    return facts | {name: version(name) for name in PACKAGES} | {tool: shutil.which(tool) or "no" for tool in TOOLS}


def architecture() -> str:
    """Returns the architecture of the GPU, and that of an H200 without one."""
    import torch

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return "90a-real" if major == 9 else f"{major}{minor}-real"


def configured(build: Path) -> None:
    """Configures a build in a folder. Raises CalledProcessError where CMake fails."""
    import pybind11

    # Without nvcc an architecture is an error of CMake's; the rest of the build is still checked.
    cuda = f"SPECENGINE_CUDA_ARCHITECTURES={architecture()}" if shutil.which("nvcc") else "SPECENGINE_CUDA=0"
    command = [
        *["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"],
        f"-D{cuda}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={build / 'core'}",
    ]
    subprocess.run(command, check=True)


def planned(build: Path) -> list[Path]:
    """Returns the extension modules that a configured build writes."""
    lines = (build / "build.ninja").read_text(encoding="utf-8")
    names = re.findall(r"^build (\S+\.so)[: ].*MODULE_LIBRARY", lines, re.MULTILINE)
    return [(build / name).resolve() for name in names]


def install(new: Path) -> None:
    """Puts a new core beside the sources in one step. Raises CalledProcessError, before, for one that is of no use."""
    subprocess.run([sys.executable, "-c", LOAD, str(new)], check=True)
    part = CORE.with_suffix(".part")
    shutil.copy2(new, part)
    part.replace(CORE)


def main(path: Path, dry: bool) -> int:
    facts = machine()
    for name, value in facts.items():
        print(f"{name:18} {value}", flush=True)
    path.write_text(json.dumps({"machine": facts}), encoding="utf-8")
    begin = time.monotonic()
    # Each Python has a folder of its own: CMake keeps what it found of one.
    build = ROOT / "build" / f"gpu{'-dry' if dry else ''}-{sys.implementation.cache_tag}"
    configured(build)
    new = build / "core" / CORE.name
    if planned(build) != [new]:
        print(f"the build would write {planned(build)}, expected {new}")
        return 1
    if not dry:
        subprocess.run(["cmake", "--build", str(build), "--parallel"], check=True)
        install(new)
    about = "import json, specengine; print(json.dumps(specengine.build_info()))"
    done = subprocess.run([sys.executable, "-c", about], check=True, stdout=subprocess.PIPE, text=True)
    info = json.loads(done.stdout.splitlines()[-1])
    path.write_text(json.dumps({"machine": facts, "build": info}), encoding="utf-8")
    kernels = " ".join(info["cuda_architectures"]) or "none, as the build found no nvcc"
    seconds = time.monotonic() - begin
    print(f"GPU: {facts['GPU']}; torch: {facts['torch']}; CUDA kernels: {kernels}; built in {seconds:.0f} s")
    return 0 if dry or (info["cuda_architectures"] and facts["GPU"] != "no") else 1


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), "--dry" in sys.argv))
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
