"""Each call that a captured cycle may not make is refused, and its harmless twin is let through."""

import pytest
import torch

from tests.fake_cuda.mode import CUDA
from tests.fake_cuda.refused import Refused
from tests.selection import looped

REFUSED = {
    "a number": (lambda x, at: x[0, 0].item(), "_local_scalar_dense"),
    "an integer": (lambda x, at: int(at[0]), "_local_scalar_dense"),
    "a float": (lambda x, at: float(x[0, 0]), "_local_scalar_dense"),
    "an end of a slice": (lambda x, at: x[: at[0]], "_local_scalar_dense"),
    "a truth": (lambda x, at: bool(x[0, 0]), "_local_scalar_dense"),
    "a list of numbers": (lambda x, at: x.tolist(), "copies between"),
    "a copy to the host": (lambda x, at: x.cpu(), "copies between"),
    "a pageable copy": (lambda x, at: torch.zeros(3).to(CUDA), "copies between"),
    "a pageable copy into a tensor": (lambda x, at: x.copy_(torch.zeros(3, 4)), "copies between"),
    "a tensor of numbers": (lambda x, at: torch.tensor([1, 2], device=CUDA), "copies between"),
    "a list as an index": (lambda x, at: x[:, [1, 0]], "copies between"),
    "an index on the host": (lambda x, at: x[torch.tensor([0])], "copies between"),
    "a number for a scatter": (lambda x, at: x.__setitem__(at, 1.0), "copies between"),
    "nonzero": (lambda x, at: x.nonzero(), "nonzero"),
    "a mask as an index": (lambda x, at: x[x > 0], "a mask"),
    "a mask for a scatter": (lambda x, at: x.__setitem__(x > 0, x), "a mask"),
    "masked_select": (lambda x, at: x.masked_select(x > 0), "masked_select"),
    "unique": (lambda x, at: x.unique(), "_unique2"),
    "unique rows": (lambda x, at: x.unique(dim=0), "unique_dim"),
    "unique runs": (lambda x, at: torch.unique_consecutive(x), "unique_consecutive"),
    "bincount": (lambda x, at: torch.bincount(at), "bincount"),
    "is_nonzero": (lambda x, at: torch.is_nonzero(x[0, 0]), "_local_scalar_dense|is_nonzero"),
    "an inverse that is checked": (lambda x, at: torch.linalg.inv(x[:, :3]), "_linalg_check_errors"),
    "repeats counted by the device": (lambda x, at: torch.repeat_interleave(at), "repeat_interleave"),
    "equal": (lambda x, at: torch.equal(x, x), "equal"),
}
ALLOWED = {
    "where": (lambda x, at: torch.where(x > 0, x, -1), {"gt": 1, "scalar_tensor": 1, "where": 1}),
    "an index on the device": (lambda x, at: x[:, at], {"index": 1}),
    "a scatter": (lambda x, at: x.__setitem__(at, x[:2]), {"index_put_": 1}),
    "a number for a slice": (lambda x, at: x.__setitem__((slice(None), 1), 2), {"fill_": 1}),
    "a tensor for a slice": (lambda x, at: x.__setitem__(0, x[1]), {"copy_": 1}),
    "views": (lambda x, at: x[None, 1:, ..., 0].expand(5, -1).view(5, 2), {}),
    "no conversion": (lambda x, at: x.to(torch.float32), {}),
    "a conversion": (lambda x, at: x.to(torch.bfloat16), {"_to_copy": 1}),
    "repeats counted by the host": (lambda x, at: x.repeat_interleave(2, dim=0), {"clone": 1}),
    "a mask as a condition": (lambda x, at: x.masked_fill(x > 0, 1), {"gt": 1, "masked_fill": 1}),
    "an inverse that is not checked": (lambda x, at: torch.linalg.inv_ex(x[:, :3]), {"linalg_inv_ex": 1}),
    "an allocation": (lambda x, at: torch.empty_like(x), {}),
    "nothing to do": (lambda x, at: x[:0].clone(), {}),
    "a number of the host as an argument": (lambda x, at: x * torch.tensor(2.0), {"mul": 1}),
}


@pytest.fixture
def tensors(device):
    return torch.zeros(3, 4, device=CUDA), torch.zeros(2, dtype=torch.int64, device=CUDA)


@looped("name", REFUSED)
def test_calls_that_wait_or_copy_are_refused(device, tensors, name):
    call, message = REFUSED[name]
    with pytest.raises(Refused, match=message), device.captured():
        call(*tensors)


@looped("name", ALLOWED)
def test_other_calls_are_counted(device, tensors, name):
    call, counts = ALLOWED[name]
    with device.captured() as launches:
        call(*tensors)
    assert dict(launches.torch) == counts and not launches.ours


def test_outside_of_a_capture_reads_give_zeros_and_count_as_waits(device, tensors):
    x, _ = tensors
    assert x.tolist() == [[0.0] * 4] * 3 and x[0, 0].item() == 0
    assert len(device.waits) == 2
    assert torch.arange(3).tolist() == [0, 1, 2]  # the host's tensors are real
