"""Weights in large pages: zeros, aligned, apart from each other, and free again when no one has them."""

import gc

import psutil
import pytest
import torch

from specengine.utils import large_pages


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(large_pages, "_chunk", torch.empty(0, dtype=torch.uint8))


def test_tensors_are_zeros_aligned_and_apart(fresh):
    shapes = [((3, 5, 16), torch.float32), ((7,), torch.uint8), ((0, 4), torch.bfloat16), ((20 << 20,), torch.uint8)]
    made = [large_pages.zeros(*shape) for shape in (*shapes, *shapes)]
    for number, tensor in enumerate(made):
        assert not tensor.any() and tensor.data_ptr() % large_pages.ALIGNMENT == 0
        tensor.fill_(number + 1)
    for number, tensor in enumerate(made):
        assert (tensor == number + 1).all() and tensor.is_contiguous()
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in made] == [*shapes, *shapes]


def test_small_tensors_share_a_chunk_and_a_large_one_has_its_own(fresh):
    first, second = large_pages.zeros((1000,), torch.uint8), large_pages.zeros((8,), torch.float32)
    assert second.data_ptr() - first.data_ptr() == 1024 and first.data_ptr() % large_pages.PAGE == 0
    large = large_pages.zeros((large_pages.CHUNK + 1,), torch.uint8)
    assert large.data_ptr() % large_pages.PAGE == 0


def test_memory_is_free_when_no_tensor_of_a_chunk_is_left(fresh):
    process = psutil.Process()
    before = process.memory_info().rss
    tensors = [large_pages.zeros((large_pages.CHUNK,), torch.uint8).fill_(1) for _ in range(4)]
    held = process.memory_info().rss - before
    assert held > 3.5 * large_pages.CHUNK
    del tensors
    gc.collect()
    assert process.memory_info().rss - before < 1.5 * large_pages.CHUNK  # the last chunk waits for more tensors


def test_elsewhere_pages_are_ordinary(fresh, monkeypatch):
    monkeypatch.delattr(large_pages.mmap, "MADV_HUGEPAGE")
    assert not large_pages.zeros((4, 4), torch.float32).any()
    assert not len(large_pages._chunk)
