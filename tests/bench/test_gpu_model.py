"""The GPU model: launches whose times are known by hand, planted slow ones, its constants, and the recorded table."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specengine.bench.__main__ import app
from specengine.bench.gpu_model import report
from specengine.bench.gpu_model.coded import GOAL, SQUARE, coded_linears
from specengine.bench.gpu_model.constants import Gpu, gpu_of
from specengine.bench.gpu_model.counts import Launch, Traffic, between, launches
from specengine.bench.gpu_model.cycles import cycles, goals
from specengine.bench.gpu_model.hybrid import MODELS, hybrid_pass, hybrid_passes, state_bytes
from specengine.bench.gpu_model.mixture import distinct_experts, mixture_pass, mixture_passes
from specengine.bench.gpu_model.passes import SHAPES, fused, layers, linear, op
from specengine.bench.gpu_model.roofline import kernel_time, library_time, occupancy_of
from tests.structure.source import ROOT

LAUNCHES = ROOT / "tests" / "fake_cuda" / "launches.json"
RECORDED = ROOT / "bench" / "results" / "gpu-model-h200.json"
H200 = gpu_of("h200")
MB = 1 << 20
# Reads 64 MB of a weight once, by 128 bytes a request.
STREAM = Launch(
    op="by hand",
    kernel="by_hand",
    blocks=132,
    threads=256,
    registers=32,
    shared_bytes=0,
    products=0,
    copies=0,
    requests=0,
    wavefronts=0,
    least_wavefronts=0,
    tensors={"weight": {"uncached": Traffic(64 * MB // 128, 64 * MB, 64 * MB // 32, 64 * MB // 32, 64 * MB)}},
    rounds={"weight": 1},
    chain=1,
)


def seen(launch: Launch, **changed: int) -> Launch:
    """The launch with other traffic of its weight."""
    traffic = replace(launch.tensors["weight"]["uncached"], **changed)
    return replace(launch, tensors={"weight": {"uncached": traffic}})


def test_a_stream_takes_the_time_of_its_bytes():
    time = kernel_time(STREAM, H200)
    assert time.bound == "dram" and time.dram_bytes == time.l2_bytes == 64 * MB
    assert time.terms["dram"] == pytest.approx(64 * MB / H200.dram)
    assert time.terms["l2"] == pytest.approx(64 * MB / H200.l2)
    assert time.us == pytest.approx(H200.start + H200.dram_latency + 64 * MB / H200.dram)


def test_an_uncoalesced_twin_is_slower_through_l2_alone():
    # Every lane of a request has a sector of its own: 32 sectors instead of 4.
    time = kernel_time(seen(STREAM, sectors=8 * 64 * MB // 32), H200)
    assert time.bound == "l2" and time.terms["l2"] == pytest.approx(8 * 64 * MB / H200.l2)
    assert time.terms["dram"] == kernel_time(STREAM, H200).terms["dram"]


def test_a_bank_conflict_is_slower_through_shared_memory_alone():
    least = 132 * 50_000
    for conflict, bound in ((1, "shared"), (32, "shared")):
        launch = replace(STREAM, requests=least, wavefronts=conflict * least, least_wavefronts=least)
        time = kernel_time(launch, H200)
        assert time.bound == bound and time.terms["shared"] == pytest.approx(conflict * 50_000 / 1755)


def test_a_tensor_from_l2_costs_no_dram():
    (traffic,) = STREAM.tensors.values()
    time = kernel_time(replace(STREAM, tensors={"x": traffic}, rounds={"x": 1}), replace(H200, l2_bytes=64 * MB))
    assert time.bound == "l2" and time.dram_bytes == 0
    assert time.us == pytest.approx(H200.start + 64 * MB / H200.l2)


def test_few_blocks_reach_few_multiprocessors():
    assert kernel_time(replace(STREAM, blocks=16), H200).terms["l2"] == pytest.approx(64 * MB / 16 / (64 * 1755))
    # 133 blocks of equal work: one multiprocessor has two of them.
    lone = kernel_time(replace(STREAM, blocks=133, products=133 * 1000), H200)
    assert lone.terms["tensor"] == pytest.approx(2 * 1000 * 4096 * 132 / 600e6)


def test_occupancy_is_limited_by_registers_shared_memory_and_threads():
    assert occupancy_of(STREAM, H200) == 8  # 2,048 threads
    assert occupancy_of(replace(STREAM, registers=128), H200) == 2
    assert occupancy_of(replace(STREAM, shared_bytes=48 * 1024), H200) == 4
    assert occupancy_of(replace(STREAM, threads=32), H200) == 32
    with pytest.raises(ValueError, match="no block of by_hand fits"):
        occupancy_of(replace(STREAM, shared_bytes=228 * 1024), H200)


def test_waits_add_up_over_waves_and_dependent_loads():
    idle = replace(STREAM, tensors={}, rounds={"x": 2, "weight": 1}, chain=1, blocks=132 * 8)
    assert kernel_time(idle, H200).terms["latency"] == pytest.approx(2 * H200.l2_latency + 0.8)
    assert kernel_time(replace(idle, chain=5), H200).terms["latency"] == pytest.approx(4 * H200.l2_latency + 0.8)
    assert kernel_time(replace(idle, blocks=132 * 8 + 1), H200).terms["latency"] == pytest.approx(
        2 * (2 * H200.l2_latency + 0.8)
    )
    # Copies that keep one piece of 16 bytes per thread under way wait for DRAM again and again.
    thin = kernel_time(replace(STREAM, copies=1), H200)
    assert thin.terms["latency"] == pytest.approx(0.8 * 64 * MB / (16 * 256 * 132))


def test_last_blocks_work_alone_behind_all_others():
    parts = Traffic(64 * MB // 512, 64 * MB, 64 * MB // 32, 64 * MB // 32, 64 * MB)
    for counters, share in ((8, 1 / 8), (133, 2 / 133)):
        arrivals = Traffic(264, 4 * 264, 264, 264, 4 * counters)
        tensors = {"workspace": {"store": parts, "uncached": parts}, "arrived": {"atomic": arrivals}}
        time = kernel_time(replace(STREAM, tensors=STREAM.tensors | tensors), H200)
        moves = max(64 * MB * share / H200.multiprocessor_l2, 64 * MB / H200.l2)
        assert time.last_block_us == pytest.approx(3 * H200.l2_latency + moves)
        others = H200.start + H200.dram_latency + max(time.terms.values())
        assert time.us == pytest.approx(others + time.last_block_us)
        assert time.l2_bytes == 3 * 64 * MB + 32 * 264
        # The bytes that one block reads again are no other block's.
        assert time.terms["l2"] == pytest.approx((2 * 64 * MB + 32 * 264) / H200.l2)
    without = kernel_time(replace(STREAM, tensors=STREAM.tensors | {"workspace": tensors["workspace"]}), H200)
    assert without.last_block_us == 0


@pytest.mark.parametrize("nodes, batch", [(1, 1), (128, 1), (1, 64)])
def test_a_prefetch_moves_bytes_of_dram_from_one_kernel_to_the_one_before(nodes, batch):
    off, on = ({s.label: s for s in layers(H200, nodes, batch, 1, prefetch=x)} for x in (False, True))
    moved = {name: on[name].kernels[0].dram_bytes - off[name].kernels[0].dram_bytes for name in on}
    share = 50 * MB // 8
    assert moved == {name: {"tree_attention": share, "o": -share}.get(name, 0) for name in on}
    assert on["o"].us <= off["o"].us and on["tree_attention"].us >= off["tree_attention"].us


def test_a_fused_op_is_modelled_as_its_product_and_what_its_last_blocks_read():
    product, behind = linear(H200, 8, *SHAPES.linears["o"], library=False), op(H200, "rms_norm", rows=8)
    one = fused(H200, product, behind, 8, SHAPES.hidden)
    assert one.us - product.us == pytest.approx(3 * H200.l2_latency + 8 * 4 * SHAPES.hidden / H200.multiprocessor_l2)
    assert one.dram_bytes == product.dram_bytes + behind[0].dram_bytes
    assert fused(H200, product, behind, 8, 0).us == product.us  # a gate waits for nobody
    assert fused(H200, product, behind, 9, 0) is None  # too many rows
    assert fused(H200, library_time(8, *SHAPES.linears["o"], H200), behind, 8, 0) is None


def test_scaling_is_linear_in_every_axis():
    corners = {(x, y): {"a": [{"n": 3 + 2 * x + 5 * y + 7 * x * y, "name": "k"}]} for x in (1, 2) for y in (10, 30)}
    assert between(corners, (6, 50)) == {"a": [{"n": 3 + 12 + 250 + 2100, "name": "k"}]}
    corners[2, 30]["a"][0]["name"] = "other"
    with pytest.raises(ValueError, match="different kernels"):
        between(corners, (6, 50))


def test_a_size_that_nothing_is_known_of_is_refused():
    with pytest.raises(ValueError, match="rope_cache is not counted at"):
        launches("rope_cache", {"nodes": 7, "batch": 1})


def test_constants_are_replaced_by_those_of_a_file(tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"name": "mine", "dram": H200.dram / 2, "multiprocessors": 100}))
    gpu = gpu_of(str(file))
    assert gpu == replace(Gpu(), name="mine", dram=H200.dram / 2, multiprocessors=100)
    assert kernel_time(STREAM, gpu).terms["dram"] == 2 * kernel_time(STREAM, H200).terms["dram"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "cannot read constants"),
        ("[]", "cannot read constants"),
        ('{"drum": 1}', "unknown constants: drum"),
        ('{"dram": 0}', "dram: expected a positive float, got 0"),
        ('{"dram": "fast"}', "dram: expected a positive float"),
        ('{"threads": 1.5}', "threads: expected a positive int, got 1.5"),
        ('{"start": NaN}', "start: expected a positive float, got nan"),
        ('{"name": 3}', "name: expected a positive str|name: expected"),
    ],
)
def test_constants_that_cannot_be_are_refused(tmp_path, content, message):
    file = tmp_path / "measured.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"gpu-model: .*({message})"):
        gpu_of(str(file))
    with pytest.raises(ValueError, match="gpu-model: expected h200 or a JSON file"):
        gpu_of("h300")


def test_a_pass_reads_every_weight_once_and_the_cache_once():
    plain = next(cycle for cycle in cycles(H200) if cycle.name == "plain")
    s = SHAPES
    weights = sum(2 * n * c * (1 if name == "head" else s.layers) for name, (n, c) in s.linears.items())
    cache = s.layers * 2 * 2 * 2049 * s.kv_heads * s.head_dim
    norms = (2 * s.layers + 1) * 4 * s.hidden
    read = sum(step.count * kernel.dram_bytes for step in plain.steps for kernel in step.kernels)
    assert read == weights + cache + norms  # the row of the embedding is not counted
    assert plain.ms > 1e3 * read / (1e6 * H200.library_dram)


def test_weights_in_codes_are_read_once_and_reach_the_goal_at_one_row_where_the_start_does_not_dominate():
    found = {(each["format"], each["layer"]): each for each in coded_linears()}
    for format, layer, bits in (("int4_128_float16", SQUARE, 4.1875), ("e4m3", SQUARE, 8.25)):
        each = found[format, layer]
        assert each["weight_bytes"] == 8192 * 8192 * bits / 8
        assert each["modelled_share"][0] >= GOAL > each["modelled_share"][-1]  # 16 rows of x pass through L2
        assert each["modelled_share"][0] > each["published_marlin_share"]
    assert found["int4_128_float16", "o"]["modelled_share"][0] < GOAL  # 9 MB: the start is half of the time


def test_a_tensor_larger_than_l2_is_from_dram_on_any_path():
    (traffic,) = STREAM.tensors.values()
    stored = replace(STREAM, tensors={"out": {"store": traffic["uncached"]}})
    assert kernel_time(stored, H200).dram_bytes == 64 * MB
    assert kernel_time(stored, replace(H200, l2_bytes=64 * MB)).dram_bytes == 0
    rows, n, c = 8192, 64, 4096  # 64 MB of x, 2 MB of results
    assert library_time(rows, n, c, H200).dram_bytes == 2 * n * c + 2 * rows * c


def test_the_fastest_way_to_multiply_is_taken_and_the_library_above_64_rows():
    assert linear(H200, 1, 4096, 4096).launch is not None
    assert linear(H200, 128, 4096, 4096) == library_time(128, 4096, 4096, H200)
    library, own = (linear(H200, 60, 28672, 4096, library=use) for use in (True, False))
    assert library.launch is None and own.launch is not None and library.us < own.us
    slow = replace(H200, library_dram=1e5)
    assert linear(slow, 60, 28672, 4096) == linear(slow, 60, 28672, 4096, library=False)


def test_drafts_have_no_kernels_of_pytorch():
    """As modelled; fake tensors counted them."""
    counted = json.loads(LAUNCHES.read_text())
    assert counted["eagle3, a chain of 7"]["8"]["torch"] == counted["dflash, a chain"]["6"]["torch"] == 0


def test_every_batch_has_every_number_of_rows():
    found = {(cycle.batch, cycle.rows // cycle.batch) for cycle in cycles(H200)}
    assert found >= {(batch, nodes) for batch in (1, 64) for nodes in (1, 8, 60, 128)}


def test_goals_follow_from_the_cycles():
    found = goals(H200, cycles(H200))
    assert [goal.goal for goal in found] == [270, 1.05, 5.2, 5.0]
    instant = dict.fromkeys(("dram_latency", "l2_latency", "start", "library_start"), 1e-6)
    endless = replace(H200, **dict.fromkeys(("dram", "l2", "multiprocessor_l2", "library_dram"), 1e12), **instant)
    assert found[0].modelled < goals(endless, cycles(endless))[0].modelled
    assert replace(found[0], modelled=270).met and not replace(found[0], modelled=269).met
    assert replace(found[2], modelled=5.2).met and not replace(found[2], modelled=5.3).met


def test_the_command_works_without_a_gpu_and_marks_every_table(tmp_path):
    file = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["--gpu-model", "h200", "--json", str(file)])
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert data["modelled"] is True and len(data["modelled_goals"]) == 4
    for table in report.tables(data):
        assert "odelled" in str(table.title)
        Console(file=io.StringIO()).print(table)
    assert all(word not in json.dumps(data["modelled_cycles"]) for word in ("measured", "NaN"))


OTHERS = (
    "--kernels|--perplexity|--memory|--ignore-eos|--drafters none|--rule match|--rules typical|--preset x|--model x"
)
VALUES = "--batch 2|--rows 1,2|--prefix 7|--prefill 9|--repetitions 1|--device cpu|--dtype float32|--peers llama.cpp"


@pytest.mark.parametrize(
    "option", f"{OTHERS}|{VALUES}|--limit 1|--max-new-tokens 3|--seed 1|--temperature 1".split("|")
)
def test_the_model_goes_with_no_measurement(option):
    name, *value = option.split()
    result = CliRunner().invoke(app, ["--gpu-model", "h200", name, *value])
    assert result.exit_code == 2 and "gpu-model: measures nothing" in result.output
    assert f"not {name}" in " ".join(result.output.split())


def test_the_committed_table_is_what_the_model_gives():
    """A failure: python -m specengine.bench --gpu-model h200 --json bench/results/gpu-model-h200.json."""

    def read(text: str) -> dict:  # from Python 3.12 on, sum() adds floats more exactly
        return json.loads(text, parse_float=lambda number: float(f"{float(number):.12g}"))

    recorded, now = read(RECORDED.read_text(encoding="utf-8")), read(json.dumps(report.results(H200)))
    assert {key: recorded[key] for key in now} == now


def test_a_pass_of_a_mixture_reads_the_dense_weights_and_the_experts_that_its_rows_take():
    """2 bytes a weight, 48 layers of experts with 3 x 768 x 2048 weights each, and a cache of 8 heads."""
    dense = 48 * 2048 * (5120 + 4096) + 151936 * 2048 + 48 * 128 * 2048
    for experts in (8, 80):
        read = sum(step.count * each.dram_bytes for step in mixture_pass(H200, 16, experts) for each in step.kernels)
        cache = 48 * 2 * 2048 * 8 * 128
        assert read == pytest.approx(2 * (dense + cache + 48 * experts * 3 * 768 * 2048), rel=0.02)


def test_passes_of_a_mixture_cost_more_the_more_experts_their_rows_take():
    assert distinct_experts(1) == (8, 8) and distinct_experts(10**6) == (128, 128)
    passes = mixture_passes(H200)
    assert [each["rows"] for each in passes] == [1, 4, 4, 16, 16]
    assert [each["experts_per_layer"] for each in passes] == [8, 23, 29, 68, 82]
    times = [each["over_plain"] for each in passes]
    assert times[0] == 1 and times == sorted(times) and times[-1] > 3


def test_a_pass_of_a_hybrid_reads_its_weights_keys_and_states_and_a_replay_comes_on_top():
    """Qwen3.6-27B: 2 bytes a weight, 48 layers of gated delta rule, 16 of attention, 64 MLPs; states are float32."""
    config = MODELS["Qwen3.6-27B"]
    delta_weights = 5120 * (10240 + 6144 + 48 + 48) + 6144 * 5120
    attention_weights = 5120 * (2 * 6144 + 2 * 1024) + 6144 * 5120
    weights = 48 * delta_weights + 16 * attention_weights + 64 * 3 * 5120 * 17408 + 248320 * 5120
    states = 4 * 48 * (48 * 128 * 128 + 3 * 10240)
    keys = 16 * 2 * 2048 * 4 * 256
    for rows in (1, 16):
        moved = 3 * states + 2 * rows * 4 * 48 * (2 * 10240 + 2 * 48)
        read = sum(step.count * each.dram_bytes for step in hybrid_pass(H200, config, rows) for each in step.kernels)
        assert read == pytest.approx(2 * (weights + keys) + moved, rel=0.005)
    assert states == 48 * 4 * config.gated_delta.state_floats == state_bytes(config.gated_delta, 16).pass_reads


def test_passes_of_hybrids_name_their_bytes_of_states_records_and_replays():
    passes = hybrid_passes(H200)
    found = {name: [each for each in passes if each["model"] == name] for name in MODELS}
    assert [len(each) for each in found.values()] == [3, 5]
    for plain, *others in found.values():
        assert plain["over_plain"] == 1
        for each in (plain, *others):
            assert each["record_bytes"] == each["rows"] * plain["record_bytes"] > 0
            assert each["replay_bytes"] == 2 * plain["state_bytes"] + each["record_bytes"]
            assert each["launches"] == plain["launches"]  # captured cycles of one row replay too
        times = [each["over_plain"] for each in (plain, *others)]
        assert times == sorted(times)
    assert found["Qwen3.6-27B"][-1]["over_plain"] < 1.1 < 2 < found["Qwen3.6-35B-A3B"][-1]["over_plain"]
