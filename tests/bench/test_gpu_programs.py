"""The programs that the steps of a run on a GPU call."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.gpu_scripts import FOLDER, ROOT, loaded

SANITIZED = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
1 passed
========= ERROR SUMMARY: 3 errors
"""
RACES = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
COUNTERS = """==PROF== Connected to process 1
called linear, qkv
"ID","Kernel Name","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"
"0","void specengine::linear_kernel<__half, 16>(T1)","(384,1,1)","Speed","Duration","us","1,012.5"
"0","void specengine::linear_kernel<__half, 16>(T1)","(384,1,1)","Speed","DRAM Throughput","%","81.5"
"1","void <unnamed>::linear_kernel<__half, (int)32>(T1)","(192,1,1)","Speed","Duration","ns","900"
"1","void <unnamed>::linear_kernel<__half, (int)32>(T1)","(192,1,1)","Speed","DRAM Throughput","%","70"
"1","void <unnamed>::linear_kernel<__half, (int)32>(T1)","(192,1,1)","Launch","Function Cache","","none"
"1","void <unnamed>::linear_kernel<__half, (int)32>(T1)","(192,1,1)","Launch","","","","a rule's advice"
"""


def test_every_source_with_kernels_has_a_small_test_for_the_sanitizer():
    sanitizer = loaded("sanitizer")
    folder = ROOT / "csrc" / "cuda"
    headers = {path.name for path in folder.rglob("*.cuh") if "__global__" in path.read_text(encoding="utf-8")}
    marks = ("__global__", *(f'/{name}"' for name in headers))  # kernels, or a header of kernels
    sources = {path for path in folder.rglob("*.cu") if any(mark in path.read_text(encoding="utf-8") for mark in marks)}
    named = {str(path.relative_to(folder).with_suffix("")) for path in sources}
    assert named and {name.partition(",")[0] for name in sanitizer.TESTS} == named
    for test in sanitizer.TESTS.values():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_sanitizer_s_counts_are_read():
    sanitizer = loaded("sanitizer")
    assert sanitizer.errors_in(SANITIZED) == 3
    assert sanitizer.errors_in(SANITIZED.replace("3 errors", "0 errors")) == 0
    assert sanitizer.errors_in(RACES) == 2
    assert sanitizer.errors_in("1 passed\n") is None


@pytest.mark.parametrize(("planted", "rest", "code"), [(1, 0, 0), (0, 0, 1), (None, 0, 1), (1, 1, 1), (1, None, 1)])
def test_kernels_are_clean_only_if_the_planted_bug_is_reported(tmp_path, monkeypatch, capfd, planted, rest, code):
    sanitizer = loaded("sanitizer")
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: f"/usr/bin/{name}")
    seen = {"code": 0, "log": "its log"}
    monkeypatch.setattr(sanitizer, "planted", lambda tool, folder: {**seen, "errors": planted})
    monkeypatch.setattr(sanitizer, "check", lambda tool, name: {**seen, "errors": rest if "linear" in name else 0})
    assert sanitizer.main("memcheck", tmp_path / "out.json", dry=False) == code
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["measured"][1][1] == len(sanitizer.TESTS) - (
        0 if rest == 0 else sum("linear" in name for name in sanitizer.TESTS)
    )


@pytest.mark.parametrize(
    "last, code", [("1 passed, 3 skipped", 0), ("4 skipped", "no test passed"), ("", "no test passed")]
)
def test_a_kernel_whose_test_is_skipped_is_not_clean(monkeypatch, last, code):
    sanitizer = loaded("sanitizer")
    said = f"print({last!r}); print('========= ERROR SUMMARY: 0 errors')"
    monkeypatch.setattr(sanitizer, "sanitized", lambda tool, command: [sys.executable, "-c", said])
    assert sanitizer.check("memcheck", "layer/linear")["code"] == code


def test_races_are_left_to_the_stand_in_that_finds_both(tmp_path, capfd):
    sanitizer = loaded("sanitizer")
    assert sanitizer.main("racecheck", tmp_path / "out.json", dry=True) == sanitizer.SKIPPED
    assert "finds races too" in capfd.readouterr().out


@pytest.mark.full
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "body, code, counted",
    [
        ("pass", 0, [1, 1, 0]),
        ("pytest.skip('no device')", 1, [0, 2, 0]),
        ("raise ValueError", 1, [0, 1, 1]),
    ],
)
def test_tests_that_are_all_skipped_are_a_failure(tmp_path, body, code, counted):
    (tmp_path / "test_some.py").write_text(
        f"import pytest\n\ndef test_one():\n    {body}\n\n@pytest.mark.skip\ndef test_two():\n    pass\n"
    )
    command = [sys.executable, str(FOLDER / "run_tests.py"), str(tmp_path / "out.json"), "-q", "-n", "2", str(tmp_path)]
    alone = {**os.environ, "PYTEST_ADDOPTS": ""}  # the options of this suite's run are of its own conftest
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=alone)
    assert done.returncode == code, done.stdout + done.stderr
    measured = json.loads((tmp_path / "out.json").read_text())["measured"]
    assert [count for _, count, _ in measured] == counted
    assert ("no test passed" in done.stdout) == (counted[0] == 0)


@pytest.mark.parametrize(
    "case, changed, code", [("not-strict:none@1", True, 0), ("none@1", True, 1), ("not-strict:none@1", False, 1)]
)
def test_a_text_without_strictness_only_has_to_end(tmp_path, monkeypatch, case, changed, code):
    engines = loaded("engines")
    asked = []

    def texts(engine, size):
        asked.append(engine)
        length = engines.PARAMS.max_new_tokens if changed or len(asked) == 1 else 3
        return [[len(asked)] * length for _ in range(size)]  # another text each time

    monkeypatch.setattr(engines, "texts", texts)
    assert engines.main(tmp_path / "out.json", "random:tiny-llama3", "cpu", [case]) == code


def test_without_compute_sanitizer_or_ncu_the_steps_are_skipped(tmp_path, monkeypatch, capfd):
    sanitizer, ncu = loaded("sanitizer"), loaded("ncu")
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    assert sanitizer.main("memcheck", tmp_path / "out.json", dry=False) == sanitizer.SKIPPED
    assert ncu.main(tmp_path / "out.json", "cuda") == ncu.SKIPPED
    assert capfd.readouterr().out == "no compute-sanitizer on PATH\nno ncu on PATH\n"


def test_the_profiler_s_table_is_read_by_launch():
    ncu = loaded("ncu")
    found = ncu.profiles(COUNTERS.splitlines())
    assert [launch["grid"] for launch in found] == ["(384,1,1)", "(192,1,1)"]
    assert [ncu.line_of(launch) for launch in found] == [
        "linear_kernel (384,1,1): 1012.5 us, 81.5 % of DRAM's bandwidth",
        "linear_kernel (192,1,1): 0.9 us, 70.0 % of DRAM's bandwidth",
    ]
    assert found[1]["metrics"]["Function Cache"] == ("none", "") and "" not in found[1]["metrics"]
    assert ncu.summary(found) == [
        ["launches profiled", 2, ""],
        ["linear_kernel: best share of DRAM's bandwidth", 81.5, "%"],
    ]
    assert ncu.profiles(["no table"]) == []


def test_a_build_that_would_write_the_core_elsewhere_is_refused(tmp_path, monkeypatch, capfd):
    build = loaded("core_build")
    assert build.CORE.parent == ROOT / "specengine" / "_C"

    def configured(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        where = ROOT / "specengine" / build.CORE.name
        (folder / "build.ninja").write_text(f"build {where}: CXX_MODULE_LIBRARY_LINKER___C_Release a.o\n")

    monkeypatch.setattr(build, "configured", configured)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    assert build.main(tmp_path / "out.json", dry=False) == 1
    assert "the build would write" in capfd.readouterr().out


@pytest.mark.parametrize("content", [b"no library", b""])
def test_a_new_core_that_does_not_load_leaves_the_old_one(tmp_path, monkeypatch, content):
    build = loaded("core_build")
    new, old = tmp_path / "new" / build.CORE.name, tmp_path / build.CORE.name
    new.parent.mkdir()
    new.write_bytes(content)
    old.write_bytes(b"the old core")
    monkeypatch.setattr(build, "CORE", old)
    with pytest.raises(subprocess.CalledProcessError):
        build.install(new)
    assert old.read_bytes() == b"the old core" and sorted(tmp_path.iterdir()) == [old, new.parent]


@pytest.mark.parametrize("architectures", ["", "90a-real"])
def test_a_new_core_takes_the_place_of_the_old_one_if_it_has_kernels(tmp_path, monkeypatch, architectures):
    build = loaded("core_build")
    new, old = tmp_path / "new.py", tmp_path / build.CORE.name
    new.write_text(f"cuda_architectures = {architectures!r}")
    old.write_bytes(b"the old core")
    monkeypatch.setattr(build, "CORE", old)
    if architectures:
        build.install(new)
        assert old.read_bytes() == new.read_bytes()
    else:
        with pytest.raises(subprocess.CalledProcessError):
            build.install(new)
        assert old.read_bytes() == b"the old core"


@pytest.mark.full
def test_tests_of_kernels_and_their_engines_need_no_gguf(tmp_path):
    # Of all tests that a GPU runs; sanitizer.py's must be found.
    (tmp_path / "gguf.py").write_text("raise ImportError('a machine with a GPU has no gguf')\n")
    tests = [*loaded("steps").device_tests(), *loaded("sanitizer").TESTS.values()]
    options = ["-q", "--collect-only", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
