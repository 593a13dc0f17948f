"""Rows as the products of captured drafters read them, against what torch gathers, norms and joins."""

import pytest
import torch

from specengine.ops.growth.row_inputs import join_rows

EPS = 1e-5


def normed(rows, norm):
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * norm


@pytest.mark.parametrize("left_dtype, dtype", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_rows_are_those_that_torch_gathers_norms_and_joins(cuda_backend, left_dtype, dtype):
    table, hidden = torch.randn(9, 37).to(left_dtype), torch.randn(4, 50)
    ids, above = torch.tensor([3, -1, 8, 9, 0], dtype=torch.int32), torch.tensor([1, 1, 3, 0, 2])
    norms = (torch.rand(37), torch.rand(50))
    stream = cuda_backend.put(torch.empty(5, 50))
    put = [cuda_backend.put(each) for each in (table, hidden, ids, above, *norms)]
    named = {"ids": put[2], "above": put[3], "norms": (put[4], put[5]), "stream": stream, "norms_stream": True}
    found = join_rows(put[0], put[1], dtype, **named, eps=EPS)
    left = torch.stack([table[i].float() if 0 <= i < 9 else torch.zeros(37) for i in ids.tolist()])
    right = normed(hidden[above], norms[1])
    wanted = torch.cat([normed(left, norms[0]), right], 1)
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(found.cpu(), wanted.to(dtype), **near)
    torch.testing.assert_close(stream.cpu(), right, rtol=1e-5, atol=1e-6)


def test_without_norms_rows_are_joined_as_they_are_and_neighbours_share_one(cuda_backend):
    left, right = torch.randn(2, 3), torch.randn(4, 5)
    found = join_rows(cuda_backend.put(left), cuda_backend.put(right), torch.float32)
    assert found.cpu().equal(torch.cat([left[[0, 0, 1, 1]], right], 1))


def test_sizes_that_do_not_fit_are_refused(cuda_backend):
    left, right = (cuda_backend.put(torch.zeros(3, 2)) for _ in range(2))
    with pytest.raises(ValueError, match=r"^left: 3 rows are no part of M=4"):
        join_rows(left, cuda_backend.put(torch.zeros(4, 2)), torch.float32)
    with pytest.raises(ValueError, match=r"^norms_stream: there is no right_norm"):
        join_rows(left, right, torch.float32, norms_stream=True)
