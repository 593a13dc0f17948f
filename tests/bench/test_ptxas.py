"""The reader of the compiler's report on the kernels."""

import pytest

from tests.bench.ci_scripts import loaded

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Zk1' for 'sm_90a'
ptxas info    : Function properties for _Zk1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 256 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 54.705 ms
ptxas info    : Compiling entry function '_Zk2' for 'sm_90a'
ptxas info    : Function properties for _Zk2
    48 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 48 bytes cumulative stack size
ptxas info    : Function properties for _Zhelper
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


@pytest.fixture(scope="module")
def script():
    return loaded("ptxas")


def test_registers_shared_memory_and_spills_are_read(script):
    first, second, helper = script.kernels_in(LOG)
    assert (first["kernel"], first["registers"], first["shared_bytes"], first["stack_bytes"]) == ("_Zk1", 32, 256, 0)
    assert (second["registers"], second["shared_bytes"]) == (255, 0)
    assert [second[what] for what in script.BYTES] == [48, 16, 20]
    assert helper["registers"] is None and helper["stack_bytes"] == 8
    with pytest.raises(ValueError, match="known here"):
        script.kernels_in("ptxas info    : Compiling entry function '_Zk1' for 'sm_90a'\n")


def test_what_a_build_kept_is_read_by_file_and_architecture(script, tmp_path, monkeypatch):
    other = LOG.replace("sm_90a", "sm_80").replace("_Z", "_Y")
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "csrc" / "cuda" / "linear.cu").write_text("__global__ void kernel() {}", encoding="utf-8")
    (tmp_path / "csrc" / "cuda" / "launch_mode.cu").write_text("void host() {}", encoding="utf-8")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "launch_mode.log").write_text("ptxas info    : 0 bytes gmem\n" * 2, encoding="utf-8")
    (tmp_path / "linear.log").write_text(LOG + other, encoding="utf-8")
    found = script.kept(tmp_path)
    assert set(found) == {("linear", "sm_90a"), ("linear", "sm_80")}
    assert [each["kernel"] for each in found["linear", "sm_80"]] == ["_Yk1", "_Yk2", "_Yhelper"]
    (tmp_path / "linear.log").write_text(LOG, encoding="utf-8")
    with pytest.raises(ValueError, match="nothing is said of linear for sm_80"):
        script.kept(tmp_path)


def test_spills_and_stack_frames_count_in_the_four_kernels_only(script):
    first, second, helper = script.kernels_in(LOG)
    assert script.offences({"files": {"verify_tree_walk": {"sm_80": [first]}, "linear": {"sm_80": [second]}}}) == []
    found = script.offences({"files": {"compact_kv": {"sm_80": [first], "sm_90a": [second, helper]}}})
    assert found[0] == "compact_kv, sm_90a, _Zk2: stack_bytes 48" and len(found) == 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("void specengine::(anonymous namespace)::copy<unsigned short>(unsigned short*, int)", "copy<unsigned short>"),
        ("void specengine::(anonymous namespace)::draw<specengine::Pair<(int)2> >(int)", "draw<Pair<(int)2> >"),
        ("plain", "plain"),
    ],
)
def test_names_are_short(script, name, says):
    assert script.short(name) == says
