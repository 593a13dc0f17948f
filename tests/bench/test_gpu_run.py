"""The run on a GPU: its steps, what becomes of those that fail, and which results are kept."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from specengine.bench.race.contenders import split_drafters
from tests.bench.gpu_scripts import FOLDER, ROOT, loaded


@pytest.fixture
def program(monkeypatch):
    """The program, whose steps a test replaces."""
    loaded("steps")  # the folder is on the path from here
    spec = importlib.util.spec_from_file_location("gpu_main", FOLDER / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(module, "lacking", lambda dry, environment: None)  # this machine may have no GPU
    return module


@pytest.fixture
def with_steps(program, monkeypatch):
    """Makes the program run Python code under these names, in this order."""

    def replaced(**codes):
        step, results = loaded("steps").Step, loaded("steps").RESULTS
        made = [step(name, "checks", name, 300, (sys.executable, "-c", code, results)) for name, code in codes.items()]
        monkeypatch.setattr(program, "steps", lambda dry: made)
        return program

    return replaced


WRITE = "import json, sys; json.dump({'measured': [['speed', 7.5, 'm/s']]}, open(sys.argv[1], 'w'))"


def test_a_step_that_fails_stops_no_other_and_is_named_at_the_end(with_steps, tmp_path, capfd):
    program = with_steps(
        raises="raise SystemExit('no such kernel')",
        dies="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        damaged="import sys; open(sys.argv[1], 'w').write('{')",
        skips="import sys; print('no tool'); sys.exit(77)",
        good=WRITE,
    )
    assert program.main([str(tmp_path)]) == 1
    out = capfd.readouterr().out
    assert out.endswith("3 failed steps: raises, dies, damaged\n") and "no such kernel" in out
    assert re.search(r"skips: skipped in \d+ s: no tool\n", out)
    assert re.search(r"good: done in \d+ s\n  speed: +7.5 m/s\n", out)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["failed", "failed", "failed", "skipped", "done"]
    assert [line["rc"] for line in lines] == [1, -11, 0, 77, 0]
    assert lines[-1]["measured"][0]["value"] == 7.5
    assert "no such kernel" in (tmp_path / "gpu.log").read_text()
    assert json.loads((tmp_path / "gpu-results.json").read_text())["good"] == {"measured": [["speed", 7.5, "m/s"]]}


def test_a_step_whose_time_ends_is_killed_with_what_it_started(with_steps, tmp_path, capfd, monkeypatch):
    child = f"import time; time.sleep(2); open({str(tmp_path / 'alive')!r}, 'w')"
    silent = "[sys.executable, '-E', '-c'"  # its last words would mix with those of the step
    code = f"import subprocess, sys, time; subprocess.Popen({silent}, {child!r}]); time.sleep(60)"
    program = with_steps(slow=code, good="")
    slow, good = program.steps(False)
    monkeypatch.setattr(program, "steps", lambda dry: [replace(slow, seconds=1), good])
    assert program.main([str(tmp_path)]) == 1
    out = capfd.readouterr().out
    assert re.search(r"slow: FAILED after \d+ s, its time ended", out) and "good: done" in out
    assert 'File "<string>", line 1 in <module>' in out  # where it hung
    time.sleep(2)
    assert not (tmp_path / "alive").exists()


def test_steps_without_time_are_left_out_and_the_run_is_not_a_success(with_steps, tmp_path, capfd, monkeypatch):
    program = with_steps(first="import time; time.sleep(60)", second="")
    monkeypatch.setattr(program, "LEAST", 0.5)  # seconds
    assert program.main(["--seconds", "1", str(tmp_path)]) == 1
    out = capfd.readouterr().out
    assert f"left out: first, second\nrun them with: bench/gpu.sh --steps first,second {tmp_path}\n" in out
    assert out.endswith("0 failed steps\n")
    (tmp_path / "a b").mkdir()
    assert program.main(["--dry-run", "--seconds", "0", str(tmp_path / "a b")]) == 1
    again = f"run them with: bench/gpu.sh --dry-run --steps first,second '{tmp_path}/a b'\n"
    assert again in capfd.readouterr().out


def test_a_run_without_a_failure_is_a_success_and_adds_to_the_results_before(with_steps, tmp_path, capfd):
    program = with_steps(first=WRITE, second="")
    assert program.main(["--steps", "first", str(tmp_path)]) == 0
    assert program.main(["--steps", "second", str(tmp_path)]) == 0
    assert capfd.readouterr().out.endswith("0 failed steps\n")
    assert set(json.loads((tmp_path / "gpu-results.json").read_text())) == {"first", "second"}
    assert len((tmp_path / "gpu.jsonl").read_text().splitlines()) == 2


def test_what_was_measured_stays_when_a_later_run_is_dry_or_not_finished(with_steps, tmp_path, capfd):
    def kept(name):
        return json.loads((tmp_path / name).read_text())

    assert with_steps(first=WRITE).main([str(tmp_path)]) == 0
    measured = kept("gpu-results.json")
    assert measured == {"first": {"measured": [["speed", 7.5, "m/s"]]}}
    assert with_steps(first=WRITE.replace("7.5", "0.1")).main(["--dry-run", str(tmp_path)]) == 0
    assert f"results of a dry run: {tmp_path}/gpu-results-dry.json\n" in capfd.readouterr().out
    assert kept("gpu-results.json") == measured
    assert kept("gpu-results-dry.json") == {"first": {"measured": [["speed", 0.1, "m/s"]]}}
    assert with_steps(first=WRITE).main(["--seconds", "0", str(tmp_path)]) == 1  # left out
    assert with_steps(first="raise SystemExit(1)").main([str(tmp_path)]) == 1
    assert kept("gpu-results.json") == measured
    assert with_steps(first=WRITE.replace("7.5", "8.5")).main([str(tmp_path)]) == 0
    assert kept("gpu-results.json") != measured


def test_a_run_that_lacks_something_stops_before_its_first_step(with_steps, tmp_path, capfd, monkeypatch):
    program = with_steps(build=f"open({str(tmp_path / 'built')!r}, 'w')")
    monkeypatch.setattr(program, "lacking", lambda dry, environment: None if dry else "no GPU was found")
    assert program.main([str(tmp_path / "results")]) == 2
    assert capfd.readouterr() == ("", "no GPU was found\n")
    assert not (tmp_path / "built").exists() and not (tmp_path / "results").exists()
    assert program.main(["--dry-run", str(tmp_path / "results")]) == 0
    assert (tmp_path / "built").exists()


def test_a_gpu_and_packages_are_looked_for(tmp_path):
    lacking = loaded("needs").lacking

    def has(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    environment = has("torch", "class cuda:\n  is_available = staticmethod(lambda: False)\n")
    assert lacking(True, environment) is None
    assert lacking(False, environment) == "no GPU was found; try --dry-run"
    assert lacking(False, has("torch", "class cuda:\n  is_available = staticmethod(lambda: True)\n")) is None
    for name, error in (("pybind11", "ImportError"), ("torch", "OSError")):
        environment = has(name, f"raise {error}('a library\\nis missing')")
        wanted = f"{name} cannot be imported: {error}: a library is missing"
        assert lacking(True, environment) == lacking(False, environment) == wanted


@pytest.mark.parametrize("options", [["--list"], ["--list", "--dry-run"]])
def test_a_list_whose_reader_goes_away_ends_quietly(program, options):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(FOLDER), *options]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == "" and done.returncode == 1


def test_the_folder_may_come_from_the_environment(with_steps, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path / "new"))
    assert with_steps(first="").main([]) == 0
    assert (tmp_path / "new" / "gpu.jsonl").is_file()


def test_a_core_that_is_missing_is_built_before_the_chosen_steps(with_steps, tmp_path, capfd, monkeypatch):
    program = with_steps(build="print('built')", first="")
    monkeypatch.setattr(program, "CORE", tmp_path / "core.so")
    assert program.main(["--steps", "first", str(tmp_path)]) == 0
    assert program.main(["--dry-run", "--steps", "first", str(tmp_path)]) == 0
    (tmp_path / "core.so").touch()
    assert program.main(["--steps", "first", str(tmp_path)]) == 0
    lines = [json.loads(line)["step"] for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines == ["build", "first", "first", "first"]
    assert re.search(r"build: done in \d+ s: built\n", capfd.readouterr().out)


def test_steps_are_chosen_by_name_and_group_and_keep_their_order(program, capfd):
    every = program.steps(False)
    names = [step.name for step in every]
    assert [step.name for step in program.chosen(every, "pass, build")] == ["build", "pass"]
    assert program.chosen(every, "") == every
    assert {step.group for step in program.chosen(every, "benches,tests")} == {"benches", "tests"}
    assert program.main(["--steps", "fast"]) == 2
    assert "unknown step 'fast'" in capfd.readouterr().err
    # What a first run may break on comes first.
    order = ["build", "sass", "one-key", "two-keys", "memcheck", "racecheck", "ncu", "tests", "plain"]
    assert [name for name in names if name in order] == order
    assert len(set(names)) == len(names)
    assert max(step.seconds for step in every) < program.parsed([]).seconds


def test_a_dry_run_has_a_stand_in_for_every_step_and_says_so(program):
    dry, real = program.steps(True), program.steps(False)
    assert [step.name for step in real] == [step.name for step in dry]
    assert all(step.stand_in for step in dry)
    assert not any("cuda" in step.command for step in dry)
    without = {step.name for step in real if "cuda" not in step.command}
    assert without == {"build", "sass", "memcheck", "racecheck", "tests"}


def test_a_dry_run_has_neither_a_gpu_nor_gguf(with_steps, tmp_path):
    code = "import os; assert not os.environ['CUDA_VISIBLE_DEVICES']\ntry:\n import gguf\n"
    code += "except ImportError: pass\nelse: raise SystemExit(3)"
    program = with_steps(first=code)
    assert program.main(["--dry-run", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "gpu.jsonl").read_text())["dry"] is True


@pytest.mark.full
def test_the_script_makes_a_dry_run(tmp_path):
    command = [str(ROOT / "bench" / "gpu.sh"), "--dry-run", "--steps", "two-keys,eagle3"]
    environment = {**os.environ, "OUT": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.endswith("0 failed steps\n"), done.stdout + done.stderr
    measured = json.loads((tmp_path / "gpu-results-dry.json").read_text())
    assert measured["two-keys"]["engines"]["none@2"]["cycles"] == 0  # a CPU captures none
    assert "cycle, EAGLE-3, chain of 7" in done.stdout


@pytest.mark.parametrize("dry", [False, True])
def test_the_bench_takes_every_command_and_its_results_are_found(program, monkeypatch, tmp_path, dry):
    bench = importlib.import_module("specengine.bench.__main__")
    seen = []
    monkeypatch.setattr(bench, "measure_suite", lambda options: seen.append(options) or bench.Outcome({}, []))
    monkeypatch.setattr(bench, "measure_kernels", bench.measure_suite)
    for name in ("machine", "versions", "commit"):
        monkeypatch.setattr(bench, name, lambda: "")
    (tmp_path / "out.json").touch()
    steps = [step for step in program.steps(dry) if "specengine.bench" in step.command]
    assert len(steps) == (14 if dry else 15)
    cycles = []
    for step in steps:
        command = step.command[step.command.index("specengine.bench") + 1 :]
        words = [word.replace(program.RESULTS, str(tmp_path / "out.json")) for word in command]
        bench.app(words, standalone_mode=False)
        row = {"peer": None, "tokens": 9, "seconds": 2.0, "prefill_seconds": 1.0, "ms_per_cycle": {"verify": 1.0}}
        runs = [{**row, "drafter": drafter} for drafter in split_drafters(seen[-1].drafters or "none")]
        cycles += [target.value for target in step.reading({"runs": runs}) if target.name.startswith("cycle, ")]
    assert cycles == [1.0] * 9  # eagle3, eagle3-cost, wide, dflash, batch, two of fasteagle, sampled, wide again


def test_a_step_without_a_mechanism_is_its_twin_but_for_the_switch_and_the_goals(program):
    steps = {step.name: step for step in program.steps(False)}
    off = [name.split("-no-") for name in steps if "-no-" in name]
    assert sorted(off) == [["plain", "fusion"], ["plain", "prefetch"], ["wide", "prefetch"]]
    for name, what in off:
        step, twin = steps[f"{name}-no-{what}"], steps[name]
        switch = {"prefetch": "SPECENGINE_PREFETCH", "fusion": "SPECENGINE_FUSE"}[what]
        assert step.command == ("env", f"{switch}=0", *twin.command)
        known, targets = ([*each.reading({})] for each in (twin, step))
        assert [f"{target.name}, no {what}" for target in known] == [target.name for target in targets]
        assert any(target.goal for target in known) and not any(target.goal for target in targets)


def test_the_tests_of_a_device_are_found():
    found = {str(Path(path).relative_to(ROOT)) for path in loaded("steps").device_tests()}
    assert {"tests/ops/test_linear_cuda.py", "tests/engine/device/test_device_engine.py"} <= found
    assert "tests/bench/test_gpu_targets.py" not in found
