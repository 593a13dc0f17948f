"""What bench/gpu/cycle_kernels.py makes of a profiler's events, and what bench/gpu/record.py keeps of it."""

import json

import pytest

from tests.bench.gpu_scripts import loaded


def kernel(name, begin, duration, replay=1):
    return {"cat": "kernel", "name": name, "ts": begin, "dur": duration, "args": {"correlation": replay, "grid": [1]}}


def test_shares_of_overlapping_kernels_add_up_to_the_cycle():
    # The second begins within the first; the third ends within the second.
    found = loaded("cycle_kernels").shares(
        [kernel("a", 10, 5), kernel("b", 12, 8), kernel("c", 13, 2), kernel("d", 22, 3)]
    )
    assert found == [5, 5, 0, 5] and sum(found) == 25 - 10


def test_replays_are_told_from_single_calls_and_summed_by_name():
    cycle = [kernel("void specengine::(anonymous namespace)::rms_kernel<float>(int)", 10 * i, 4, 7) for i in range(20)]
    found = loaded("cycle_kernels").summary([kernel("alone", 500, 9, 8), *reversed(cycle), {"cat": "cpu_op"}])
    (rms,) = found["kernels"]
    assert rms["kernel"] == "rms_kernel<float>" and rms["count"] == found["launches"] == 20
    assert found["median_us"] == rms["share_us"] == 194 and found["cycles"] == 1
    assert found["sequence"][1] == ["rms_kernel<float>", 10, 4, [1]]


def test_without_a_replay_there_is_no_summary():
    with pytest.raises(ValueError, match="no replay of a graph was profiled"):
        loaded("cycle_kernels").summary([kernel("alone", 0, 1)])


def test_a_record_has_every_step_once_and_no_sequences(tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder, seconds in zip(folders, (1, 2), strict=True):
        folder.mkdir()
        line = {"step": "plain", "status": "done", "seconds": seconds, "measured": [], "rc": 0}
        left_out = {**line, "seconds": 0, "status": "left out"}
        (folder / "gpu.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(left_out)}\n")
        cycles = {"none@1": {"median_us": seconds, "sequence": []}}
        (folder / "gpu-results.json").write_text(json.dumps({"cycle-kernels": {"cycles": cycles}}))
    (folders[0] / "linear.json").write_text(json.dumps({"key": {}, "seconds": {"float 8x8": {"1": {"16x8": 2e-6}}}}))
    loaded("record").main(tmp_path / "all.json", "0123", folders)
    kept = json.loads((tmp_path / "all.json").read_text())
    assert kept["gpu_steps"] == {"plain": {"status": "done", "seconds": 2, "measured": []}}
    assert kept["cycles"] == {"none@1": {"median_us": 2}} and kept["commit"] == "0123"
    assert kept["linear_seconds"] == {"float 8x8": {"1": {"16x8": 2e-6}}}
