"""Runs one small test per kernel under compute-sanitizer: python bench/gpu/sanitizer.py memcheck|racecheck JSON [--dry]

A tool must report a planted bug first. --dry runs the same tests on the execution simulator, which finds such bugs
too: racecheck is skipped there. Exits with 77 where compute-sanitizer is not found.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77  # as automake has it
AT_ONCE = 6  # processes; each takes a CUDA context and some seconds of a core to start
# A small test for every source with kernels, without the simulator's or the GPU's parameter.
SMALL = {
    "attention/compact_kv": "compact_kv::test_the_example_of_the_documentation",
    "attention/gate_heads": "gated_delta_cuda::test_open_gates_keep_heads_and_shut_ones_clear_them",
    "attention/rope_cache": "layer_cuda::test_rope_cache_finds_the_request_of_every_row_among_many",
    "attention/tree_attention_bfloat16": "tree_attention_cuda::test_padding_becomes_zeros_and_its_slots_are_not_read",
    "attention/tree_attention_float16": "tree_attention_cuda::test_padding_becomes_zeros_and_its_slots_are_not_read",
    "attention/tree_attention_exact": "tree_attention_cuda::test_large_scores_do_not_overflow",
    "attention/tree_attention_exact, splits": "tree_attention_cuda::test_a_long_prefix_is_split",
    "experts/coded_expert_linear": "experts_cuda::test_several_weights_write_their_columns_of_one_output",
    "experts/combine_experts": "experts_cuda::test_slots_are_added_with_the_bits_of_the_cpu",
    "experts/expert_linear": "experts_cuda::test_several_weights_write_their_columns_of_one_output",
    "experts/group_pairs": "experts_cuda::test_pairs_are_grouped_as_by_the_reference",
    "experts/route_rows": "experts_cuda::test_a_row_is_routed_as_it_is_alone",
    "gated_delta/compact_states": "gated_delta_cuda::test_an_empty_path_leaves_its_state_alone",
    "gated_delta/gated_delta": "gated_delta_cuda::test_padding_rows_become_zeros_and_touch_no_state",
    "layer/coded_linear": "coded_linear_cuda::test_other_columns_of_the_output_stay",
    "layer/fused_linear, gate": "fused_cuda::test_what_is_left_to_two_launches",
    "layer/fused_linear, norm": "fused_cuda::test_bad_arguments_are_refused_by_name",
    "layer/fused_linear, rope": "fused_cuda::test_a_head_of_many_rows",
    "layer/gather_rows": "linear_cuda::test_gather_rows_gives_the_rows_and_zeros_for_padding",
    "layer/linear": "linear_cuda::test_several_weights_write_their_columns_of_one_output",
    "layer/linear, argmax": "linear_cuda::test_ties_go_to_the_lower_id",
    "layer/lora": "lora::test_rows_without_an_adapter_and_padding_stay_as_they_are",
    "layer/rms_norm": "layer_cuda::test_nan_reaches_the_output_of_its_row_and_no_other",
    "layer/row_inputs": "row_inputs::test_rows_are_those_that_torch_gathers_norms_and_joins",
    "layer/silu_mul": "layer_cuda::test_a_gate_holds_over_the_whole_range",
    "sampling/draw_siblings": "verify_rules_cuda::test_rows_of_nodes_beyond_their_tree_or_the_largest_one_give_none",
    "sampling/note_rows": "noted_walks_cuda::test_a_leaf_without_a_distribution_gives_no_bonus_token",
    "sampling/walk_notes": "noted_walks_cuda::test_a_leaf_without_a_distribution_gives_no_bonus_token",
    "sampling/verify_rules": "verify_rules_cuda::test_padding_and_idle_requests_change_nothing_for_the_others",
    "sampling/verify_tree": "verify_tree_cuda::test_padding_and_idle_requests_change_nothing_for_the_others",
    "sampling/verify_tree, masks": "verify_masks::test_match_under_masks_is_the_reference",
    "trees/add_copies": "add_copies::test_a_chain_that_no_candidate_begins_hangs_below_the_root",
    "trees/commit_tokens": "commit_tokens::test_a_run_is_cut_at_the_final_length",
    "trees/draft_lookup": "draft_lookup::test_the_longest_match_wins_and_of_equals_the_newest",
    "trees/best_tokens": "growth/expand_levels::test_the_likeliest_tokens_are_those_of_torch",
    "trees/expand_levels": "expand_backbone::test_two_levels_of_two_by_hand",
    "trees/expand_levels, best first": "growth/expand_levels::test_a_tree_is_no_deeper_than_its_request_may_commit",
    "trees/expand_node": "growth/best_first_trees::test_a_node_without_a_distribution_has_no_children_on_cuda",
    "trees/expand_level": "growth/growing_trees::test_a_row_without_a_distribution_is_refused_or_has_no_children",
    "trees/gru_step": "gru_step::test_rows_continue_the_states_that_they_name",
    "trees/grow_level": "growth/growing_trees::test_nan_among_the_scores_leaves_every_row_of_the_beam_a_place",
    "trees/pairs": "pairs::test_a_cycle_leaves_the_pairs_of_its_path",
    "trees/select_nodes": "select_nodes::test_a_small_tree_by_hand",
    "trees/add_delta": "add_delta::test_a_sum_may_lie_where_its_rows_do",
    "trees/text_rows": "text_rows::test_unread_tokens_are_chains_and_count_as_read_but_for_the_root",
}
PLACES = {name: test.rpartition("/")[::2] for name, test in SMALL.items()}  # folder, and what is in it
TESTS = {
    name: f"{ROOT}/tests/{folder or 'ops'}/test_{test.replace('::', '.py::')}"
    for name, (folder, test) in PLACES.items()
}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
PASSED = re.compile(r"\b[1-9]\d* passed")  # in pytest's last line
ERRORS_SEEN = 9  # exit code of compute-sanitizer; pytest's are below 6
NAMESPACE = "specengine"  # of all kernels: others are not looked at
PLANTED = """
#include <cstdio>
#include <cstring>
namespace specengine {
__global__ void out_of_bounds_kernel(int* to) { to[threadIdx.x + (1 << 28)] = 1; }
__global__ void race_kernel(int* to) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  to[threadIdx.x] = shared[63 - threadIdx.x];  // no __syncthreads() before
}
}  // namespace specengine
int main(int, char** arguments) {
  int* memory = nullptr;
  cudaMalloc(&memory, 64 * sizeof(int));
  if (std::strcmp(arguments[1], "racecheck") == 0) {
    specengine::race_kernel<<<1, 64>>>(memory);
  } else {
    specengine::out_of_bounds_kernel<<<1, 64>>>(memory);
  }
  std::printf("%s\\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
"""


def errors_in(log: str) -> int | None:
    """Returns how many errors or hazards a log of compute-sanitizer counts, None without its summary."""
    found = [int(errors or hazards) for errors, hazards in SUMMARY.findall(log)]
    return sum(found) if found else None


def sanitized(tool: str, command: list[str]) -> list[str]:
    """Returns the command under compute-sanitizer, which looks at this project's kernels only."""
    program = shutil.which("compute-sanitizer") or "compute-sanitizer"
    options = ["--tool", tool, "--error-exitcode", str(ERRORS_SEEN)]
    listed = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    if "--kernel-regex" in listed:
        options += ["--kernel-regex", f"kns={NAMESPACE}"]
    return [program, *options, *command]


def pytest_of(test: str, mark: str) -> list[str]:
    """Returns the command of a test's plain cases with a mark, in one process."""
    chosen = f"{mark} and not full and not slow"
    options = ["-m", chosen, "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", *options, test]


def check(tool: str, name: str) -> dict[str, Any]:
    """Runs the test of a kernel, and returns whether it passed and what the tool counted."""
    # Every tensor is an allocation of its own, so that an access behind it is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = sanitized(tool, pytest_of(TESTS[name], "gpu"))
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=150
        )
    except subprocess.TimeoutExpired as error:
        return {"errors": None, "code": "timed out", "log": str(error.stdout or "")[-2000:]}
    errors = errors_in(done.stdout)
    code = done.returncode if done.returncode or PASSED.search(done.stdout) else "no test passed"
    good = code == 0 and errors == 0
    return {"errors": errors, "code": code, "log": "" if good else done.stdout[-6000:]}


def planted(tool: str, folder: Path) -> dict[str, Any]:
    """Runs the kernel with a planted bug, and returns what the tool counted."""
    source, program = folder / "planted.cu", folder / "planted"
    source.write_text(PLANTED, encoding="utf-8")
    subprocess.run(["nvcc", "-arch=native", str(source), "-o", str(program)], check=True)
    command = sanitized(tool, [str(program), tool])
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return {"errors": errors_in(done.stdout), "code": done.returncode, "log": done.stdout[-3000:]}


def simulated() -> int:
    """Runs all tests on the simulator, and returns pytest's exit code."""
    command = [*pytest_of(next(iter(TESTS.values())), "sim")[:-1], *TESTS.values()]
    return subprocess.run(command).returncode


def main(tool: str, path: Path, dry: bool) -> int:
    if dry and tool == "racecheck":
        print("memcheck's stand-in runs the same tests, and finds races too")
        return SKIPPED
    if dry:
        return simulated()
    if shutil.which("compute-sanitizer") is None:
        print("no compute-sanitizer on PATH")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        control = planted(tool, Path(folder))
    print(f"planted bug: {control['errors']} reported")
    if not control["errors"]:
        print(control["log"])
    found = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, seen in zip(TESTS, pool.map(lambda name: check(tool, name), TESTS), strict=True):
            print(f"{name}: exit code {seen['code']}, {seen['errors']} errors\n{seen['log']}".rstrip(), flush=True)
            found[name] = seen
    clean = [name for name, seen in found.items() if seen["errors"] == 0 and seen["code"] == 0]
    measured = [
        [f"{tool}: the planted bug's reports", control["errors"], ""],
        [f"{tool}: kernels without an error", len(clean), f"of {len(TESTS)}"],
    ]
    path.write_text(json.dumps({"planted": control, "kernels": found, "measured": measured}), encoding="utf-8")
    return 0 if control["errors"] and len(clean) == len(TESTS) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), "--dry" in sys.argv))
