"""The simulator's counters: traffic known by hand, planted slow accesses, and the record that the GPU model reads."""

import json

import pytest
import torch

from specengine.bench.gpu_model.counts import between, launches, recorded
from tests.backends import use_core
from tests.selection import looped
from tests.simulator import counts
from tests.simulator.load_chains import chain_of

pytestmark = pytest.mark.sim

NONE = {"requests": 0, "wavefronts": 0, "least_wavefronts": 0}


def traffic(simulated, name: str, *, broken: bool = False) -> dict:
    """The counts of a kernel of csrc/sim/traffic.cu."""
    given, out = torch.arange(1024.0), torch.zeros(1024)
    simulated.set_counting(True)
    simulated.traffic(name, given, out, broken)
    (launch,) = simulated.counted()
    simulated.set_counting(False)
    return launch


def moved(
    requests: int, sectors: int, block_sectors: int | None = None, nbytes: int = 4096, unique: int = 4096
) -> dict:
    shown = sectors if block_sectors is None else block_sectors
    counted = {"requests": requests, "sectors": sectors, "block_sectors": shown}
    return counted | {"bytes": nbytes, "unique_bytes": unique}


def test_a_copy_has_the_counts_known_by_hand(simulated):
    # 32 warps of 32 floats, 128 bytes each.
    launch = traffic(simulated, "uncoalesced")
    assert launch["tensors"] == {"in": {"load": moved(32, 128)}, "out": {"store": moved(32, 128)}}
    assert (launch["blocks"], launch["threads"], launch["shared"]) == (4, 256, NONE)
    # 8 warps of 32 vectors, 512 bytes each.
    launch = traffic(simulated, "vectors")
    assert launch["tensors"] == {"in": {"load": moved(8, 128)}, "out": {"store": moved(8, 128)}}


def test_a_planted_uncoalesced_access_is_seen(simulated):
    # Each of 32 lanes has a sector of its own, and the 8 neighbours in it are other warps' of the same block.
    assert traffic(simulated, "uncoalesced", broken=True)["tensors"]["in"]["load"] == moved(32, 1024, 128)
    # Vectors 64 bytes apart: half of each sector is for another warp.
    assert traffic(simulated, "vectors", broken=True)["tensors"]["in"]["load"] == moved(8, 256, 128)


def test_a_planted_bank_conflict_is_seen(simulated):
    good, bad = (traffic(simulated, "bank_conflict", broken=broken)["shared"] for broken in (False, True))
    assert good == {"requests": 64, "wavefronts": 64, "least_wavefronts": 64}
    # With a pitch of 32 a column lies in one bank: each of 32 reads takes 32 turns.
    assert bad == {"requests": 64, "wavefronts": 32 + 32 * 32, "least_wavefronts": 64}


def test_a_load_that_waits_for_a_load_is_another_round(simulated):
    assert traffic(simulated, "dependent")["rounds"] == {"in": 1}
    assert traffic(simulated, "dependent", broken=True)["rounds"] == {"in": 2}


def test_rms_norm_has_the_counts_known_by_hand(simulated):
    rows, columns = 3, counts.SHAPES.hidden
    (launch,) = counts.count(simulated, "rms_norm", {"rows": rows})
    read = moved(rows * columns // 128, rows * columns // 8, None, 4 * rows * columns, 4 * rows * columns)
    written = moved(rows * columns // 128, rows * columns // 16, None, 2 * rows * columns, 2 * rows * columns)
    assert launch["tensors"] == {
        "residual": {"load": read, "store": read},
        "delta": {"load": read},
        "weight": {"load": {**read, "unique_bytes": 4 * columns}},
        "out": {"store": written},
    }
    # Each of 8 warps writes its sum, and each warp reads all 8.
    assert launch["shared"] == dict.fromkeys(NONE, rows * (8 + 64))
    assert launch["rounds"] == {"residual": 1} and launch["products"] == 0


def test_a_linear_layer_reads_its_weight_once_and_its_rows_in_every_block(simulated):
    rows, n, c = 8, 64, 1024
    (launch,) = counts.count(simulated, "linear", {"rows": rows, "n": n, "c": c, "variant": 1})
    weight, x = 2 * n * c, 2 * rows * c
    assert launch["blocks"] == n // 16
    assert launch["tensors"]["weight"] == {"uncached": moved(weight // 512, weight // 32, None, weight, weight)}
    again = x * launch["blocks"]
    assert launch["tensors"]["x"] == {"load": moved(again // 512, again // 32, None, again, x)}
    assert launch["products"] == n * c // 256 and launch["rounds"] == {"x": c // 256}


def test_only_the_experts_that_rows_were_sent_to_are_read_and_each_once(simulated):
    n, c, count = 32, 512, 6
    starts = torch.tensor([0, 0, 3, 3, 8, 8, 8], dtype=torch.int32)  # experts 1 and 3 have places
    x, weight = torch.zeros(5, c, dtype=torch.bfloat16), torch.zeros(count * n, c, dtype=torch.bfloat16)
    rows = torch.tensor([0, 2, 4, 0, 1, 2, 3, 4], dtype=torch.int32)
    simulated.set_counting(True)
    simulated.expert_linear(x, rows, weight, None, starts, torch.empty(8, n), 0, n)
    (launch,) = simulated.counted()
    simulated.set_counting(False)
    read = 2 * (2 * n * c)
    assert launch["tensors"]["weight"] == {"uncached": moved(read // 512, read // 32, None, read, read)}
    assert launch["blocks"] == count * n // 16  # those past the last tile end at once


def test_counting_changes_no_result_and_ends_when_it_is_switched_off(simulated):
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 512, generator=generator).bfloat16() for n in (8, 64))
    outs = []
    for on in (False, True, False):
        simulated.set_counting(on)
        out = torch.empty(8, 64)
        simulated.linear(x, weight, None, out, 0, 64, 1, None)
        outs.append(out)
        assert len(simulated.counted()) == on
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


RECORDED_AND_LARGER = [
    ("linear", {"rows": 1, "n": 192, "c": 6144, "variant": 1}),
    ("linear", {"rows": 60, "n": 320, "c": 7168, "variant": 4}),
    ("linear", {"rows": 16, "n": 192, "c": 8192, "variant": 3}),
    ("rms_norm", {"rows": 192}),
    ("silu_mul", {"rows": 192}),
    ("gather_rows", {"rows": 192}),
    ("expert_linear", {"experts": 6, "n": 192, "c": 1536}),
]


@looped("op, size", RECORDED_AND_LARGER)
def test_counts_scaled_from_the_record_are_those_of_a_run(simulated, op, size):
    assert_recorded(simulated, op, size)


SMALLER = [
    ("tree_attention", {"nodes": 8, "batch": 2}, "prefix", (128, 192), 320),
    ("tree_attention", {"nodes": 60, "batch": 1}, "prefix", (128, 192), 320),
    ("verify_tree", {"nodes": 8, "batch": 4}, "vocabulary", (1280, 2304), 5376),
]


@looped("op, fixed, axis, small, large", SMALLER)
def test_counts_scaled_from_smaller_sizes_are_those_of_a_run(simulated, monkeypatch, op, fixed, axis, small, large):
    use_core(simulated, monkeypatch)
    runs = {(n,): counts.count(simulated, op, {**fixed, axis: n}, multiprocessors=1) for n in (*small, large)}
    found = runs.pop((large,))
    scaled = between(runs, (large,))
    for launch in (*scaled, *found):
        if table := launch["tensors"].get("block_table"):
            del table["load"]["block_sectors"]  # a sector has 8 pages: rounded up
    assert scaled == found


def test_a_split_that_ends_to_grow_cannot_be_scaled(simulated):
    """16 multiprocessors get at most 4 splits of a prefix."""
    one = {"nodes": 1, "batch": 1}
    runs = {(n,): counts.count(simulated, "tree_attention", {**one, "prefix": n}, 16) for n in (64, 128, 256)}
    found = runs.pop((256,))
    assert between(runs, (256,)) != found


EFFORT = {"tree_attention": 32, "linear": 16, "coded_linear": 16, "verify_tree": 8}  # per row; others: 1
PARTS = {"small": range(17), "medium": range(17, 513), "large": range(513, 1 << 30)}  # 2 s, 13 s, 6 minutes


def effort(op: str, size: dict[str, int]) -> int:
    return EFFORT.get(op, 1) * size.get("rows", size.get("nodes", 1) * size.get("batch", 1))


@pytest.mark.parametrize(
    "part", ["small", pytest.param("medium", marks=pytest.mark.full), pytest.param("large", marks=pytest.mark.slow)]
)
def test_the_record_is_that_of_todays_kernels(simulated, monkeypatch, part):
    """A failure: `python -m tests.simulator.counts` records anew, and bench/results/gpu-model-h200.json follows."""
    use_core(simulated, monkeypatch)
    sizes = [(op, size) for op, size in counts.sizes() if effort(op, size) in PARTS[part]]
    assert sizes
    for op, size in sizes:
        assert_recorded(simulated, op, size)


def assert_recorded(simulated, op: str, size: dict[str, int]) -> None:
    """Compares a run with what the model takes from the record for that size."""
    found, recorded = counts.count(simulated, op, size), launches(op, size)
    assert len(found) == len(recorded)
    for launch, known in zip(found, recorded, strict=True):
        assert counts.name_of(simulated, launch["kernel"]) == known.kernel
        for name in ("op", "blocks", "threads", "products", "copies", "rounds"):
            assert launch[name] == getattr(known, name), (op, size, name)
        assert launch["dynamic_shared"] + launch["static_shared"] == known.shared_bytes
        shared = {name: getattr(known, name) for name in NONE}
        assert launch["shared"] == shared, (op, size)
        tensors = {name: {path: vars(t) for path, t in by.items()} for name, by in known.tensors.items()}
        assert launch["tensors"] == tensors, (op, size)


def test_registers_of_the_record_are_those_that_the_compiler_gave():
    known = recorded()["kernels"]
    compiled = json.loads(counts.PTXAS.read_text(encoding="utf-8"))["files"]
    registers = {row["kernel"]: row["registers"] for file in compiled.values() for row in file["sm_90a"]}
    assert known and all(each["registers"] == registers[name] for name, each in known.items())


def test_a_chain_of_loads_is_read_from_ptx():
    independent = """
        ld.param.u64 	%rd1, [p];
        ld.global.u32 	%r1, [%rd1];
        ld.global.u32 	%r2, [%rd1+4];
        add.s32 	%r3, %r1, %r2;
        st.global.u32 	[%rd1], %r3;
    """
    chained = """
        ld.global.u32 	%r1, [%rd1];  // an index
        mul.wide.s32 	%rd2, %r1, 4;
        ld.global.nc.v2.u32 	{%r2, %r3}, [%rd2+8];
        shfl.sync.idx.b32 	%r4|%p1, %r3, 0, 31, -1;
        setp.gt.s32 	%p2, %r4, 0;
        @%p2 cp.async.cg.shared.global [%r9], [%rd1], 16, %r8;
        atom.global.add.u32 	%r5, [%rd1], %r4;
    """
    assert chain_of(independent) == 1
    assert chain_of(chained) == 3
    assert chain_of("add.s32 %r1, %r2, %r3;") == 0
