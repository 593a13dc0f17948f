"""The reader of the CUDA kernels' machine code."""

import shutil
import subprocess
from collections import Counter

import pytest

from tests.bench.ci_scripts import FOLDER, loaded

SCRIPT = FOLDER / "sass"
LINEAR = "_ZN10specengine42_GLOBAL__N__0f1a9d2_9_linear_cu_c082913linear_kernelI6__halfLi16EEEvPKT_"
LINEAR_FLOAT = LINEAR.replace("6__half", "f")
TENSOR = "_ZN10specengine23tensor_attention_kernelI6__halfLi64EEEvPKT_"
EXACT = "_ZN10specengine22exact_attention_kernelIfLi64EEEvPKT_"
LISTING = f"""
Fatbin elf code:
================
	code for sm_90a
		Function : {LINEAR}
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;               /* 0x00000a00ff017624 */
                                                                        /* 0x000fe400078e00ff */
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128.ZFILL [R2], desc[UR14][R4.64], P1 ;   /* 0x00000 */
        /*0020*/                   HMMA.16816.F32 R4, R8, R2, R4 ;      /* 0x0000000000007919 */
		Function : {EXACT}
        /*0000*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR14][R4.64] ;             /* 0x00000 */
"""
SPILLING = """
__global__ void planted_kernel(float* p, int n) {
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = p[i];
  for (int i = 0; i < n; i++) a[i * 7 % 64] += a[i % 64];
  p[n] = a[n % 64];
}
__global__ void clean_kernel(float* p) { p[threadIdx.x] *= 2; }
"""


@pytest.fixture(scope="module")
def script():
    return loaded("sass")


def kernels(**changes):
    """Kernels as they should be, but those that are named."""
    good = {
        LINEAR: Counter({"LDGSTS.E.BYPASS.128.ZFILL": 2, "HMMA.16816.F32": 4}),
        LINEAR_FLOAT: Counter({"LDGSTS.E.BYPASS.128": 2}),
        TENSOR: Counter({"LDGSTS.E.BYPASS.128": 2, "HMMA.16816.F32.BF16": 4}),
        EXACT: Counter({"LDGSTS.E.BYPASS.128": 2}),
        "_Z16select_nodes_kernelPi": Counter({"instructions": 9}),
    }
    return good | {globals()[name]: Counter(codes) for name, codes in changes.items()}


def test_instructions_are_counted_by_kernel_with_and_without_predicates(script):
    found = script.kernels_in(LISTING.splitlines())
    assert found == {
        LINEAR: {"instructions": 3, "LDGSTS.E.BYPASS.128.ZFILL": 1, "HMMA.16816.F32": 1},
        EXACT: {"instructions": 1, "LDGSTS.E.BYPASS.128": 1},
    }
    assert [script.template_of(name) for name in found] == ["linear_kernel", "exact_attention_kernel"]


@pytest.mark.parametrize("text", ["", "no listing", f"Function : {LINEAR}\n  another form of code"])
def test_what_is_no_listing_is_refused(script, text):
    with pytest.raises(ValueError, match="known here"):
        script.kernels_in(text.splitlines())


def test_kernels_as_they_should_be_are_accepted(script):
    assert script.offences("sm_90a", kernels()) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"EXACT": {"LDGSTS.E.BYPASS.128": 2, "STL.128": 3}}, "3 STL, which is local memory"),
        ({"EXACT": {"LDGSTS.E.BYPASS.128": 2, "LDL": 1, "LDL.LU": 1}}, "2 LDL, which is local memory"),
        ({"LINEAR_FLOAT": {"LDGSTS.E.BYPASS.128": 2, "LDGSTS.E.64": 2}}, "less than 128 bits: LDGSTS.E.64"),
        ({"EXACT": {"LDG.E.128": 2}}, "no asynchronous copies"),
        ({"LINEAR": {"LDGSTS.E.BYPASS.128": 2, "FFMA": 2}}, "no tensor core products"),
        ({"TENSOR": {"LDGSTS.E.BYPASS.128": 2}}, "no tensor core products"),
    ],
)
def test_each_offence_is_seen(script, changes, says):
    (wrong,) = script.offences("sm_90a", kernels(**changes))
    assert wrong.startswith("sm_90a, ") and wrong.endswith(says)


def test_a_kernel_that_is_gone_or_renamed_is_noticed(script):
    found = kernels()
    del found[EXACT]
    assert script.offences("sm_80", found) == ["sm_80: no kernel is called exact_attention_kernelI"]


def test_without_cuobjdump_the_check_is_skipped_and_says_what_it_lacks(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "tool", lambda: None)
    assert script.main([str(tmp_path / "core.so")]) == script.SKIPPED
    assert "no cuobjdump" in capsys.readouterr().out


@pytest.mark.full
def test_a_planted_kernel_with_local_memory_is_seen_in_its_machine_code(script, tmp_path):
    if shutil.which("nvcc") is None or script.tool() is None:
        pytest.skip("needs nvcc, and cuobjdump with nvdisasm beside it")
    source, cubin = tmp_path / "planted.cu", tmp_path / "planted.cubin"
    source.write_text(SPILLING, encoding="utf-8")
    subprocess.run(["nvcc", "-arch=sm_90a", "-cubin", str(source), "-o", str(cubin)], check=True)
    found = script.disassembled(script.tool(), cubin, "sm_90a")
    wrong = [line for line in script.offences("sm_90a", found) if "local memory" in line]
    assert len(wrong) == 2 and all("planted_kernel" in line for line in wrong)
    assert {script.template_of(name) for name in found} == {"planted_kernel", "clean_kernel"}
    assert script.main([str(cubin)]) == 1
