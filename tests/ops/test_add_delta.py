"""Rows plus what a product made of them, against torch's sum."""

import pytest
import torch
from torch.nn import functional

from specengine.ops.growth.add_delta import add_delta


@pytest.mark.parametrize("silu", [False, True])
def test_rows_are_torchs_sum_and_are_rounded_for_the_next_product(cuda_backend, silu):
    x, delta = torch.randn(5, 67), 9 * torch.randn(5, 67)
    wanted = x + (functional.silu(delta) if silu else delta)
    total = cuda_backend.put(torch.empty(5, 67))
    out = add_delta(cuda_backend.put(x), cuda_backend.put(delta), torch.bfloat16, total=total, silu=silu)
    torch.testing.assert_close(total.cpu(), wanted, rtol=1e-6, atol=1e-6)
    assert out.dtype == torch.bfloat16 and out.cpu().equal(total.cpu().bfloat16())


def test_a_sum_may_lie_where_its_rows_do(cuda_backend):
    x, delta = torch.randn(3, 8), torch.randn(3, 8)
    rows = cuda_backend.put(x.clone())
    out = add_delta(rows, cuda_backend.put(delta), torch.float32, total=rows)
    assert rows.cpu().equal(x + delta) and out.cpu().equal(x + delta)


def test_rows_may_be_zeros(cuda_backend):
    delta = torch.randn(3, 8)
    out = add_delta(None, cuda_backend.put(delta), torch.float32, silu=True)
    torch.testing.assert_close(out.cpu(), functional.silu(delta), rtol=1e-6, atol=1e-6)


def test_sizes_that_do_not_fit_are_refused(cuda_backend):
    with pytest.raises(ValueError, match=r"^x: "):
        add_delta(cuda_backend.put(torch.zeros(3, 8)), cuda_backend.put(torch.zeros(2, 8)), torch.float32)
