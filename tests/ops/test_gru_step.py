"""The step of a GRU against PyTorch's own cell."""

import pytest
import torch

from specengine.ops.growth.gru_step import gru_step


def cell(size, read, state, keep):
    """What torch.nn.GRUCell makes of products of tokens, of states, and of their weights."""
    module = torch.nn.GRUCell(3 * size, size, bias=False)
    module.weight_ih.data = torch.eye(3 * size)
    module.weight_hh.data = keep
    with torch.no_grad():
        return module(read, state)


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [3, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_is_that_of_a_gru(cuda_backend, size, dtype):
    read, state, keep = drawn(4, 3 * size, seed=1), drawn(4, size, seed=2), drawn(3 * size, size, seed=3) / size
    put = cuda_backend.put
    found = gru_step(put(read), put(state @ keep.T), put(state), None, dtype)
    expected = cell(size, read, state, keep)
    torch.testing.assert_close(found.exact.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert found.rounded.dtype == dtype and found.rounded.equal(found.exact.to(dtype))


def test_the_first_step_has_no_state(cuda_backend):
    read = drawn(2, 9, seed=4)
    found = gru_step(cuda_backend.put(read), None, None, None, torch.float16)
    torch.testing.assert_close(found.exact.cpu(), cell(3, read, torch.zeros(2, 3), torch.zeros(9, 3)))


def test_rows_continue_the_states_that_they_name(cuda_backend):
    read, state, kept = drawn(5, 12, seed=5), drawn(2, 4, seed=6), drawn(2, 12, seed=7)
    above = torch.tensor([1, 0, 0, 1, 1])
    put = cuda_backend.put
    found = gru_step(put(read), put(kept), put(state), put(above), torch.float32)
    there = gru_step(put(read), put(kept[above]), put(state[above]), None, torch.float32)
    assert found.exact.equal(there.exact) and len(found.exact) == 5


def test_shapes_that_do_not_fit_are_refused(cuda_backend):
    put = cuda_backend.put
    read, state = put(torch.zeros(2, 12)), put(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"^read: expected 9 columns, got 11"):
        gru_step(put(torch.zeros(2, 11)), None, None, None, torch.float32)
    with pytest.raises(ValueError, match=r"^state: expected 2 rows, got 3"):
        gru_step(read, put(torch.zeros(3, 12)), state, None, torch.float32)
    with pytest.raises(ValueError, match=r"^state: expected with kept, or neither"):
        gru_step(read, put(torch.zeros(3, 12)), None, None, torch.float32)
