"""What CI reads of the compiler's report on the kernels."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "ptxas"
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
    if not SCRIPT.is_file():
        pytest.skip("the tests run without the repository's .ci folder")
    loader = SourceFileLoader("ptxas", str(SCRIPT))
    module = module_from_spec(spec_from_loader("ptxas", loader))
    loader.exec_module(module)
    return module


def test_registers_shared_memory_and_spills_are_read(script):
    first, second, helper = script.kernels_in(LOG)
    assert (first["kernel"], first["registers"], first["shared_bytes"], first["stack_bytes"]) == ("_Zk1", 32, 256, 0)
    assert (second["registers"], second["shared_bytes"]) == (255, 0)
    assert [second[what] for what in script.BYTES] == [48, 16, 20]
    assert helper["registers"] is None and helper["stack_bytes"] == 8
    with pytest.raises(ValueError, match="known here"):
        script.kernels_in("ptxas info    : Compiling entry function '_Zk1' for 'sm_90a'\n")


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
