"""The worker threads of the CPU ops: their number, forks, several callers, and a system that gives no more threads."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from specengine import _C
from specengine.ops.linear import Projection, linear
from specengine.ops.weight import Weight
from tests.ops.cases import randn
from tests.selection import wide

COLUMNS, ROWS = 64, 4000

# What the subprocesses below share: one op of enough pieces for many threads, and its right result.
PRELUDE = f"""
import os, signal, sys, threading
import torch
from specengine import _C
x, weight = torch.ones(7, {COLUMNS}), torch.ones({ROWS // 16}, {COLUMNS}, 16)
def works():
    out = torch.zeros(7, {ROWS})
    _C.linear(x, weight, None, out, 0, {ROWS}, 0, None)
    return bool((out == {COLUMNS}).all())
"""

ADDRESS, THREAD = (name in os.environ.get("LD_PRELOAD", "") for name in ("libasan", "libtsan"))  # the sanitizers


def run_python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter; fails with its errors."""
    env = {**os.environ, "OMP_NUM_THREADS": "2", **environment}
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, Projection((Weight(weight, ROWS, "float32"),), None))


def test_the_number_of_threads_is_what_was_set():
    for count in (1, 2, 5, 1024):
        _C.set_num_threads(count)
        assert _C.num_threads() == count


@pytest.mark.parametrize("count", [0, -1, 1025, 2**31 - 1])
def test_a_number_of_threads_out_of_range_is_refused(count):
    before = _C.num_threads()
    with pytest.raises(ValueError, match=r"^n: expected 1 to 1024 threads, got "):
        _C.set_num_threads(count)
    assert _C.num_threads() == before


def test_changing_the_number_between_calls_gives_equal_results():
    x, weight = randn(9, COLUMNS), randn(ROWS // 16, COLUMNS, 16, seed=2)
    _C.set_num_threads(1)
    expected = multiply(x, weight)
    for count in (2, 3, 1, 8, 2, 40, 2):
        _C.set_num_threads(count)
        for _ in range(20):
            assert torch.equal(multiply(x, weight), expected)


def test_concurrent_callers_get_equal_results():
    x, weight = randn(9, COLUMNS), randn(ROWS // 16, COLUMNS, 16, seed=2)
    expected = multiply(x, weight)
    wrong = []

    def call(own_threads: int) -> None:
        for i in range(100):
            if i % 10 == 0:
                _C.set_num_threads(own_threads)  # the pool is remade under the others' feet
            if not torch.equal(multiply(x, weight), expected):
                wrong.append(own_threads)

    callers = [threading.Thread(target=call, args=(count,)) for count in (1, 2, 3, 4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.parametrize("value, expected", wide([("3", "3"), ("1", "1"), ("999999", "1024")]))
def test_omp_num_threads_is_honoured(value, expected):
    assert run_python("print(_C.num_threads(), works())", OMP_NUM_THREADS=value) == f"{expected} True\n"


@pytest.mark.full
@pytest.mark.parametrize("value", wide(["many", "", "0", "-2"]))
def test_an_omp_num_threads_that_is_no_number_means_the_cores_of_the_process(value):
    cores = len(os.sched_getaffinity(0))
    assert run_python("print(_C.num_threads())", OMP_NUM_THREADS=value) == f"{cores}\n"


@pytest.mark.skipif(
    ADDRESS or THREAD,
    reason="AddressSanitizer's allocator does not survive a fork in the middle of another thread's allocation, "
    "ThreadSanitizer starts no threads in the child of a process that had several",
)
def test_ops_work_in_the_child_of_a_fork_and_still_in_the_parent():
    code = """
_C.set_num_threads(3)
assert works()
stop = threading.Event()
def keep_busy():
    while not stop.is_set():
        works()
busy = threading.Thread(target=keep_busy)  # so that some forks happen in the middle of a job
busy.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang is a failure
        first = works()
        _C.set_num_threads(2)  # must not wait for threads that only the parent has
        os._exit(0 if first and works() else 3)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
busy.join()
assert works()
print("done")
"""
    assert run_python(code) == "done\n"


@pytest.mark.full
@pytest.mark.skipif(ADDRESS, reason="a sanitized process needs all address space")
def test_a_system_that_gives_no_more_threads_slows_the_ops_and_does_not_stop_them():
    code = """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)  # room for about 20 stacks
_C.set_num_threads(1024)
print(works(), works(), len(os.listdir("/proc/self/task")) < 1000)
"""
    assert run_python(code) == "True True True\n"
