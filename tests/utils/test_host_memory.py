"""What the host does with numpy on the CPU is done by torch on a GPU: simulated runs do that too."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specengine.models.hidden_states import HiddenStates
from specengine.ops import row_tools
from specengine.utils import host_memory
from tests.backends import cpu_kernels
from tests.selection import looped
from tests.structure.source import modules

CPU = torch.device("cpu")
ROWS = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.5, 0.0, -1.0, 0.5], [4.0, 5.0, 6.0, 7.0]]).repeat(1, 2)
BY_A_KERNEL = "take_rows by a tensor"  # on a device
CALLS = {
    "likeliest": lambda: row_tools.likeliest(ROWS, 2),
    "confidence": lambda: torch.tensor(row_tools.confidence(ROWS)),
    "take_rows": lambda: row_tools.take_rows(ROWS, [2, 0, 2]),
    BY_A_KERNEL: lambda: row_tools.take_rows(ROWS, torch.tensor([1, 1])),
    "stack_rows": lambda: row_tools.stack_rows([ROWS, ROWS[1:]]),
    "join_columns": lambda: row_tools.join_columns([ROWS, ROWS[:, :1]]),
    "zero_rows": lambda: row_tools.zero_rows(2, 3, CPU),
}
# These choose kernels and a checkpoint's values by the kind of device, whatever the memory.
CHOOSE_BY_TYPE = {"specengine.ops", "specengine.models.checkpoint_random"}


@looped("name", {*CALLS} - {BY_A_KERNEL})
def test_both_branches_give_the_same(name):
    ours = CALLS[name]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "HOST_TYPES", frozenset())
        theirs = CALLS[name]()
    if isinstance(ours, list):
        assert ours == theirs
    else:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.sim
def test_simulated_runs_take_the_branches_of_a_gpu(cuda_backend, monkeypatch):
    if cuda_backend.name != "sim":
        pytest.skip("these tensors are the host's")
    monkeypatch.setattr(row_tools, "np", SimpleNamespace(ndarray=np.ndarray))  # nothing else of it may be used
    for call in CALLS.values():
        call()
    with cpu_kernels():
        for name in {*CALLS} - {"likeliest", BY_A_KERNEL}:  # which call methods of arrays alone
            with pytest.raises(AttributeError, match="SimpleNamespace"):
                CALLS[name]()


def test_rows_of_a_pass_are_copied_where_the_next_one_overwrites_them(monkeypatch):
    whole = HiddenStates(ROWS.clone())
    assert whole.rows([1, 2]).last.data_ptr() == whole.last[1:].data_ptr()
    monkeypatch.setattr(host_memory, "HOST_TYPES", frozenset())
    assert whole.rows([1, 2]).last.data_ptr() != whole.last[1:].data_ptr()


def compares_with_cpu(source: str) -> bool:
    """Whether code asks a device for its type."""
    return re.search(r"""[!=]= ?["']cpu["']|["']cpu["'] ?[!=]=""", source) is not None


def test_no_module_asks_in_another_way():
    assert {each.name for each in modules() if compares_with_cpu(each.path.read_text("utf-8"))} == CHOOSE_BY_TYPE
    assert compares_with_cpu('x = 1 if device.type != "cpu" else 2')
    assert not compares_with_cpu('x = torch.device("cpu")')


def test_float_rows_are_those_that_the_last_replay_wrote():
    states = HiddenStates(ROWS.bfloat16())
    assert states.last.dtype == torch.float32 and states.last.equal(ROWS.bfloat16().float())
    states.normed.zero_()
    assert not states.last.any() and not states.rows([1]).last.any()
