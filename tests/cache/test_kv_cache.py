import pytest
import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import KVCache


def new_cache():
    return KVCache(layers=2, kv_heads=3, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))


def test_requests_get_as_many_pages_as_they_need_and_none_twice():
    cache = new_cache()
    first, second = cache.allocate(PAGE_SIZE), cache.allocate(PAGE_SIZE + 1)
    assert (len(first), len(second)) == (1, 2)
    assert len({*first, *second}) == 3
    cache.free(first)
    assert cache.allocate(1) == first


def test_growing_keeps_what_is_cached():
    cache = new_cache()
    (page,) = cache.allocate(1)
    cache.k[:, page] = 1.5
    cache.v[:, page] = 2.5
    cache.allocate(50 * PAGE_SIZE)
    assert (cache.k[:, page] == 1.5).all() and (cache.v[:, page] == 2.5).all()


def test_a_batch_pads_its_block_table():
    cache = new_cache()
    pages = [cache.allocate(10), cache.allocate(200)]
    batch = cache.batch(pages, [4, 150])
    assert batch.block_table.shape == (2, 4) and batch.lengths.tolist() == [4, 150]
    assert batch.block_table[1].tolist() == pages[1]


def test_no_room_is_a_clear_error():
    cache = new_cache()
    with pytest.raises(MemoryError, match="key/value cache: no room for"):
        cache.allocate(2**44)
    assert cache.allocate(1)  # still usable
