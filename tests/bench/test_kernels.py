"""Kernels beside PyTorch: every case runs, both sides compute the same, and the numbers are those of the clock."""

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from specengine.bench import modes
from specengine.bench.__main__ import app
from specengine.bench.kernels.cases import cases
from specengine.bench.kernels.linear_cases import PACKED
from specengine.bench.kernels.measure import kernels_table, time_kernels
from specengine.bench.kernels.shapes import CPU, CUDA, MOST_SETS, Kernels, Shapes
from specengine.bench.kernels.timers import HostTimer, medians
from specengine.bench.kernels.torch_reference import verify
from specengine.types import SamplingParams

SMALL = Shapes(
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=64,
    intermediate=96,
    vocab=300,
    layers=2,
    prefixes=(70,),
    trees=(1, 12),
    rows=(1, 3),
    levels=2,
    k=3,
    accepted=3,
    cold_bytes=60_000,
)
KERNELS = {
    "tree_attention",
    "compact_kv",
    "expand_backbone",
    "select_nodes",
    "verify_tree",
    "linear",
    "rms_norm",
    "silu_mul",
    "rope_cache",
}
# int8 and int4 are compared with 8 bits of PyTorch.
ERRORS = {"tree_attention": 0.01, "linear": 0.01, "linear, int8": 0.03, "linear, int4": 0.15}


class Clock:
    """Makes timers that run every call once; each timer reports 2 us more than the one before."""

    def __init__(self):
        self.made = self.calls = 0

    def __call__(self, calls):
        self.made += 1
        self.calls += len(calls)
        for call in calls:
            call()
        seconds = 2e-6 * self.made
        return lambda: seconds


@pytest.mark.quick(1)
def test_every_kernel_is_measured_against_pytorch(cuda_backend):
    measure(cuda_backend.device, CUDA)


def test_every_op_of_the_cpu_is_measured_against_pytorch():
    measure(torch.device("cpu"), CPU)


def measure(place: torch.device, kernels: Kernels) -> None:
    clock = Clock()
    rows = time_kernels(place, 1e9, SMALL, kernels, timer=clock, rounds=3, least_calls=1)
    linears = {f"linear, {dtype}" for dtype in PACKED} if kernels.packed else {"linear"}
    measured = KERNELS - {"linear"} | linears
    assert {row["kernel"] for row in rows} == measured
    assert clock.made == sum(1 + max(1, len(row["us_by_variant"])) for row in rows) and clock.calls > clock.made
    for row in rows:
        # both sides compute the same, in bfloat16 if weights and caches are bfloat16
        assert row["error"] is None or row["error"] <= ERRORS.get(row["kernel"], 0.005), row
        # the first variant was timed first, PyTorch last
        variants = max(1, len(row["us_by_variant"]))
        assert row["torch_us"] == pytest.approx(row["us"] + 2 * variants)
        assert row["speedup"] == pytest.approx(row["torch_us"] / row["us"]) and row["floor_bytes"] > 0
        assert row["gb_per_second"] == pytest.approx(row["floor_bytes"] / row["us"] / 1e3)
        assert row["bandwidth_fraction"] == pytest.approx(row["gb_per_second"])  # of 1 GB/s
    compared = {row["kernel"] for row in rows if row["error"] is not None}
    assert compared == measured - {"compact_kv"}
    json.dumps(rows)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(kernels_table(rows, 1e9))
    assert all(kernel in capture.get() for kernel in measured) and "of memory" in capture.get()


def test_the_shapes_are_those_of_the_model_and_buffers_exceed_the_caches():
    shapes = Shapes()
    assert shapes.linears["qkv"] == (6144, 4096) and shapes.linears["gate_up"] == (28672, 4096)
    assert shapes.linears["down"] == (4096, 14336) and shapes.linears["head"] == (128256, 4096)
    for nbytes in (4 << 20, 50 << 20):
        assert shapes.sets(nbytes) * nbytes >= shapes.cold_bytes
    assert shapes.sets(1 << 30) == 1 and shapes.sets(1) == MOST_SETS


def test_the_floor_counts_every_byte_once(cuda_backend):
    floors = {(case.kernel, case.size): case.nbytes for case in cases(SMALL, cuda_backend.device, CUDA)}
    # keys and values of the prefix and the tree in bfloat16, the queries in float32, the result in bfloat16
    assert floors["tree_attention", "N=12, 70 tokens"] == 2 * 82 * 2 * 16 * 2 + 12 * 4 * 16 * (4 + 2)
    assert floors["compact_kv", "2 layers, 3 rows"] == 2 * (2 * 2 * 3 * 2 * 16 * 2)
    assert floors["expand_backbone", "2 levels, k=3"] == 2 * 300 * 4
    # four numbers of each candidate; of each node four and a word of ancestor bits
    assert floors["select_nodes", "12 of 22"] == 22 * 4 * 4 + 12 * 5 * 4
    assert floors["verify_tree", "N=12, T=0.8, top-p 0.95"] == 12 * 300 * 4
    assert floors["verify_tree", "N=12, T=0, masks"] == 12 * (300 + 10) * 4
    assert floors["linear", "o 64x64, M=3"] == 64 * 64 * 2 + 3 * 64 * (2 + 4)


def test_pytorch_walks_the_tree_as_the_rule_does():
    logits = torch.zeros(5, 10)
    for node, token in enumerate((4, 6, 7, 8, 9)):
        logits[node, token] = 50.0
    tokens, parents = torch.tensor([1, 3, 4, 7, 2]).int(), torch.tensor([-1, 0, 0, 2, 3]).int()
    for params in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95)):
        assert verify(logits, tokens, parents, params, 4).tolist() == [0, 2, 3, -1]
    flat = SamplingParams(temperature=1.0, top_p=0.5)
    drawn = {tuple(verify(torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])), tokens[:1], parents[:1], flat, 1).tolist())}
    assert drawn == {(0,)}


def test_medians_are_taken_in_turns():
    order, values = [], {"a": iter([9, 1, 2, 30]), "b": iter([9, 5, 6, 7])}

    def timer(name):
        return lambda: order.append(name) or next(values[name])

    assert medians([timer("a"), timer("b")], rounds=3) == [2, 6]
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    ran = []
    assert HostTimer([lambda: ran.append(1), lambda: ran.append(2)])() > 0 and ran == [1, 1, 2]


def test_the_command_measures_the_device_that_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(modes, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(
        modes, "time_kernels", lambda device, speed: time_kernels(device, speed, SMALL, rounds=1, least_calls=1)
    )
    result = CliRunner().invoke(app, ["--kernels", "--device", "cpu", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0 and "of memory" in result.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["device"] == "cpu" and {row["kernel"].split(",")[0] for row in written["kernels"]} == KERNELS
