"""Goals of a GPU: values are read from the runs, and missing runs are no values."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_targets", ROOT / "bench" / "gpu_targets.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass reads its annotations there
    spec.loader.exec_module(module)
    return module


def run_of(device="cuda:0"):
    def row(drafter, **ms):
        seconds = {"tokens": 256, "seconds": 1.5, "prefill_seconds": 0.5}
        return {"peer": None, "drafter": drafter, "ms_per_cycle": {"host": 0.02, **ms}, **seconds}

    runs = [
        row("none", verify=3.6),
        row("synthetic:0.8,cost=eagle3", draft=1.0, verify=3.98, bend=0.5),
        row("synthetic:0.8,k=10,cost=fasteagle", draft=1.0, expand=0.02, verify=3.86, accept=0.05, compact=0.05),
        row("synthetic:0.8,k=10,cost=eagle3", draft=3.0, verify=3.98),
    ]
    return {"device": device, "runs": runs, "rows": [{"rows": 1, "ratio": 1.0}, {"rows": 60, "ratio": 1.05}]}


def test_cycles_shares_and_speeds_are_read_from_the_runs(script):
    found = {target.name: target for target in script.targets(run_of(), {})}
    values = {name: target.value and round(target.value, 6) for name, target in found.items()}
    assert values == {
        "plain decoding": 256,
        "pass of 60 nodes over pass of one": 1.05,
        "cycle of a chain of 7, EAGLE-3's cost": 5.0,  # without the phase `bend`
        "cycle of a tree of 61 nodes, fasteagle's cost": 5.0,
        "cycle of a tree of 61 nodes, eagle3's cost": 7.0,
        "verification, compaction, expansion, greedy": 2.4,
        "verification, compaction, expansion, sampled": None,
        "host between two cycles, plain": round(2 / 3.62, 6),
        "host between two cycles, chain": 0.4,
        "host between two cycles, tree": 0.4,
    }
    assert [target.met for target in found.values()] == [True, True, True, True, False, True, None, True, True, True]


def test_runs_that_are_missing_or_not_on_a_gpu_say_nothing(script, tmp_path, capsys):
    (tmp_path / "gpu-cycles.json").write_text(json.dumps(run_of("cpu")))
    script.main(tmp_path)
    written = json.loads((tmp_path / "gpu-targets.json").read_text())
    assert {each["value"] for each in written} == {None}
    assert capsys.readouterr().out.count("not measured") == len(written)
