"""The build compiles CUDA for the visible GPUs, for those that are asked for, or not at all, and says which."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.build_scripts import ROOT, loaded

cuda_choice = loaded("cuda_choice")
ALL = cuda_choice.ALL


def fake_smi(folder: Path, says: str, status: int = 0) -> str:
    """Writes an nvidia-smi; returns a PATH that begins with its folder."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{says}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    "says, status, devices, found",
    [
        ("9.0", 0, ("nvidia0", "nvidiactl"), ["9.0"]),
        ("8.6\n8.6\n9.0", 0, (), ["8.6", "8.6", "9.0"]),  # WSL has no device files
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, (), []),
        ("NVIDIA-SMI has failed", 9, ("nvidiactl", "nvidia-uvm"), []),
        ('Field "compute_cap" is not a valid field to query.', 2, ("nvidia0",), ["unknown"]),
    ],
)
def test_gpus_are_seen_by_nvidia_smi_or_by_their_device_files(tmp_path, monkeypatch, says, status, devices, found):
    monkeypatch.setenv("PATH", fake_smi(tmp_path / "bin", says, status))
    (tmp_path / "dev").mkdir()
    for name in devices:
        (tmp_path / "dev" / name).touch()
    assert cuda_choice.visible_gpus(tmp_path / "dev") == found


def test_device_files_without_nvidia_smi_are_a_gpu_of_unknown_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda_choice.visible_gpus(tmp_path) == []
    (tmp_path / "nvidia1").touch()
    assert cuda_choice.visible_gpus(tmp_path) == ["unknown"]


@pytest.mark.parametrize(
    "cuda, architectures, gpus, chosen, required",
    [
        ("", "", [], "", False),
        ("", "", ["9.0"], "90a-real", False),
        ("", "", ["8.0", "8.9", "8.9"], "80-real;89-real", False),
        ("", "", ["12.0"], "90-virtual", False),
        ("", "", ["7.5"], "", False),
        ("", "", ["7.5", "8.6"], "86-real", False),
        ("", "", ["unknown"], ALL, False),
        ("1", "", [], ALL, True),
        ("ON", "", ["9.0"], "90a-real", True),
        ("all", "", ["9.0"], ALL, True),
        ("all", "", [], ALL, True),
        ("0", "", ["9.0"], "", False),
        ("OFF", "90a-real", ["9.0"], "", False),
        ("", "80-real;90a-real", ["8.6"], "80-real;90a-real", True),
        ("1", "90a-real", [], "90a-real", True),
    ],
)
def test_the_architectures_follow_from_what_is_asked_for_and_what_is_visible(
    cuda, architectures, gpus, chosen, required
):
    choice = cuda_choice.choose(cuda, architectures, lambda: gpus)
    assert choice[:2] == (chosen, required)
    assert "\n" not in choice.reason and (chosen or "left out") in choice.reason


def test_a_build_without_a_gpu_says_how_to_ask_for_cuda():
    assert "SPECENGINE_CUDA=1" in cuda_choice.choose(gpus=list).reason
    assert "SPECENGINE_CUDA" not in cuda_choice.choose(gpus=lambda: ["9.0"]).reason


def test_a_misspelt_wish_is_an_error():
    with pytest.raises(ValueError, match="SPECENGINE_CUDA: expected 0, 1 or all, got 'yes'"):
        cuda_choice.choose("yes")


@pytest.mark.parametrize(
    "environment, chosen",
    [
        ({}, "86-real"),
        ({"SPECENGINE_CUDA": "all"}, ALL),
        ({"SPECENGINE_CUDA": "all", "CMAKE_ARGS": "-DSPECENGINE_CUDA=OFF"}, ""),
        ({"SPECENGINE_CUDA": "0", "CMAKE_ARGS": "-G Ninja -D SPECENGINE_CUDA:STRING=ON -DX=1"}, "86-real"),
        ({"CMAKE_ARGS": "-DSPECENGINE_CUDA_ARCHITECTURES=80-real;90a-real"}, "80-real;90a-real"),
    ],
)
def test_options_of_cmake_come_before_the_environment(environment, chosen):
    assert cuda_choice.choose_for(environment, lambda: ["8.6"]).architectures == chosen


def test_the_key_of_a_cached_core_contains_the_choice():
    choices = [{"SPECENGINE_CUDA": wish} for wish in ("0", "1", "all")]
    facts = [f"CUDA {cuda_choice.choose_for(environment, lambda: ['9.0'])}" for environment in choices]
    core_key = loaded("build_cache").core_key
    assert len({core_key(ROOT, [fact], {}) for fact in facts}) == len(facts)
    assert 'f"CUDA {cuda}"' in (ROOT / "setup.py").read_text(encoding="utf-8")


def configure(folder: Path, path: str, **settings: str) -> subprocess.CompletedProcess:
    import pybind11

    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPECENGINE_")}
    command = [
        *[shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{path}"), "-S", str(ROOT)],
        *["-B", str(folder), "-G", "Unix Makefiles", f"-DPython_EXECUTABLE={sys.executable}"],
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    environment |= {"PATH": path, **settings}
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_cmake_follows_the_choice_and_fails_without_nvcc_if_cuda_was_asked_for(tmp_path):
    blind, sees = fake_smi(tmp_path / "blind", "no devices", 6), fake_smi(tmp_path / "sees", "9.0")
    nvcc = {"CUDACXX": str(tmp_path / "no-nvcc")}
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        done = configure(tmp_path / "without", blind, **nvcc)
        assert done.returncode == 0 and "CUDA is left out, as no GPU is visible; SPECENGINE_CUDA=1" in done.stdout
    done = configure(tmp_path / "unasked", sees, **nvcc)
    assert done.returncode == 0 and "CUDA is left out after all: no nvcc that works was found" in done.stdout
    done = configure(tmp_path / "asked", sees, SPECENGINE_CUDA="1", **nvcc)
    assert done.returncode != 0 and "CUDA was asked for, but no nvcc that works was found" in done.stdout
    done = configure(tmp_path / "misspelt", sees, SPECENGINE_CUDA="yes", **nvcc)
    assert done.returncode != 0 and "SPECENGINE_CUDA: expected 0, 1 or all" in done.stdout


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cmake_compiles_for_the_visible_gpu_alone(tmp_path):
    done = configure(tmp_path / "build", fake_smi(tmp_path / "bin", "8.6\n9.0"))
    assert done.returncode == 0, done.stdout
    flags = (tmp_path / "build/CMakeFiles/cuda_ops.dir/flags.make").read_text(encoding="utf-8")
    for code in ("sm_86", "sm_90a"):
        assert code in flags
    assert "sm_80" not in flags and "code=[compute_90" not in flags
