import mmap

import psutil
import pytest
import torch

from specengine._C import PAGE_SIZE
from specengine.cache import kv_cache
from specengine.cache.kv_cache import KVCache
from specengine.cache.state_memory import StateMemory
from specengine.utils.gated_delta_config import GatedDeltaConfig
from tests.cache.small_caches import EVERYBODY


def new_cache():
    """A page of one layer is a multiple of the system's page."""
    return KVCache(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))


def test_requests_get_as_many_pages_as_they_need_and_none_twice():
    cache = new_cache()
    first, second = cache.allocate(PAGE_SIZE), cache.allocate(PAGE_SIZE + 1)
    assert (len(first), len(second)) == (1, 2)
    assert len({*first, *second}) == 3
    cache.free(first)
    assert cache.allocate(1) == first


def test_a_million_pages_that_nobody_writes_take_no_memory_and_move_nothing():
    cache, memory = new_cache(), psutil.Process().memory_info
    (page,) = cache.allocate(1)
    cache.k[:, page], cache.v[:, page] = 1.5, 2.5
    before, place = memory().rss, cache.k.data_ptr()
    pages = cache.allocate(PAGE_SIZE << 20)  # of 16 KiB each
    assert memory().rss - before < 256 << 20  # the list of their numbers
    cache.k[:, pages[-1]] = 3.5
    assert cache.k.data_ptr() == place and (cache.k[:, page] == 1.5).all() and (cache.v[:, page] == 2.5).all()
    cache.free(pages)
    cache.rest()
    assert memory().rss - before < 256 << 20


def test_memory_goes_back_when_no_request_runs(monkeypatch):
    cache = new_cache()
    cache.kept_bytes = 2 * cache.page_bytes
    monkeypatch.setattr(kv_cache, "IDLE_BYTES", 3 * cache.page_bytes)
    many, running = cache.allocate(20 * PAGE_SIZE), cache.allocate(1)
    cache.k[:, many + running], cache.v[:, many + running] = 1.0, 2.0
    text = [7] * (2 * PAGE_SIZE) + [8]
    cache.free(many, text, EVERYBODY)
    cache.rest()
    assert cache.pages_with_memory == 21 and (cache.k[:, :21] == 1).all() and (cache.v[:, :21] == 2).all()
    cache.free(running)
    cache.rest()
    assert cache.pages_with_memory == 5  # two of the prefix cache, three for the next request
    for first_slots in (each[:, :21, 0, 0, 0] for each in (cache.k, cache.v)):
        assert first_slots.count_nonzero(dim=1).tolist() == [5, 5]
    found, hit = cache.allocate_with_prefix(3 * PAGE_SIZE, text, EVERYBODY)
    assert hit == 2 * PAGE_SIZE and (cache.k[:, found[:2]] == 1).all() and (cache.v[:, found[:2]] == 2).all()


def test_a_process_with_little_address_space_gets_a_smaller_pool(monkeypatch):
    limit, taken, reserve = 1 << 30, [], mmap.mmap

    class Bounded:
        """An mmap of a process with `limit` bytes of address space."""

        def __new__(cls, number, size, **options):
            if sum(len(each) for each in taken if not each.closed) + size > limit:
                raise OSError("no address space")
            taken.append(reserve(number, size, **options))
            return taken[-1]

    monkeypatch.setattr(mmap, "mmap", Bounded)
    cache = new_cache()
    assert 1 << 27 < cache.k.nbytes == cache.v.nbytes <= 1 << 28
    companion = cache.companion(1, 2, 8, torch.float32)  # as large as a drafter's may be
    assert companion.k.shape[1] == cache.k.shape[1]
    with pytest.raises(ValueError, match="prompt: with its answer and a tree it needs room for"):
        cache.check_fits((cache.k.shape[1] + 1) * PAGE_SIZE)
    states = StateMemory(GatedDeltaConfig(frozenset({0}), 1, 2, 3, 4), torch.device("cpu"))
    assert states.slots > 1000 and new_cache().k.shape[1] > 1000
    limit = 0
    with pytest.raises(MemoryError, match="key/value cache: no room for"):
        new_cache()


def test_a_batch_pads_its_block_table():
    cache = new_cache()
    pages = [cache.allocate(10), cache.allocate(200)]
    batch = cache.batch(pages, [4, 150])
    assert batch.block_table.shape == (2, 4) and batch.lengths.tolist() == [4, 150]
    assert batch.block_table[1].tolist() == pages[1]


def test_no_room_is_a_clear_error():
    cache = new_cache()
    with pytest.raises(MemoryError, match=f"key/value cache: {2**38} pages are needed, "):
        cache.allocate(2**44)
    assert not cache.has_room(2**44)
    assert cache.allocate(1)  # still usable
