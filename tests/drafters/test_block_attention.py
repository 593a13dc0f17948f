"""What a block's slots see: every kind of mask, by the ops of the CPU and of CUDA, against plain attention."""

import pytest
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.cache_batch import CacheBatch
from specengine.drafters.block.attention import BlockAttention, BlockMask
from specengine.ops import cuda_ops, native
from tests.ops.cases import randn

HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTHS = [2 * PAGE_SIZE + 3, 2]
MASKS = [
    BlockMask(),
    BlockMask(window=4),
    BlockMask(window=4, from_anchor=True),
    BlockMask(causal=True),
    BlockMask(causal=True, window=4),
    BlockMask(causal=True, window=4, from_anchor=True),
]


def expected(q, k, v, table, mask, size):
    """Slot by slot, by masked softmax."""
    out = torch.empty_like(q)
    for b, length in enumerate(LENGTHS):
        keys, values = (side[table[b].long()].transpose(0, 1).flatten(1, 2)[:, : length + size] for side in (k, v))
        place = torch.arange(length + size)
        for slot in range(size):
            hidden = place > length + (slot if mask.causal else size - 1)
            if mask.window and mask.from_anchor:
                hidden |= place < length - mask.window
            elif mask.window:
                hidden |= length + slot - place >= mask.window
            row = b * size + slot
            for head in range(HEADS):
                own = head * KV_HEADS // HEADS
                scores = (keys[own] @ q[row, head] * DIM**-0.5).masked_fill(hidden, -torch.inf)
                out[row, head] = scores.softmax(0) @ values[own]
    return out


def check(ops, put, mask, size):
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    k, v = randn(2, 8, KV_HEADS, PAGE_SIZE, DIM)
    q = randn(2 * size, HEADS, DIM, seed=2)
    place = CacheBatch(put(table), put(torch.tensor(LENGTHS, dtype=torch.int32)))
    attention = BlockAttention(ops, HEADS, KV_HEADS, DIM, size).at(place)
    out = attention(put(q), put(k), put(v), mask, torch.float32)
    torch.testing.assert_close(out.cpu().view_as(q), expected(q, k, v, table, mask, size), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_slot_sees_what_its_mask_shows(mask, size):
    check(native.layer, lambda x: x, mask, size)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_slot_sees_what_its_mask_shows_on_a_device(cuda_backend, mask, size):
    check(cuda_ops(cuda_backend.device, strict=True).layer, cuda_backend.put, mask, size)
