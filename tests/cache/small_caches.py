"""Small caches and texts of whole pages."""

import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import KVCache
from specengine.cache.prefix_cache import Sharing

EVERYBODY = Sharing()


def new_cache(pages=None, kept_pages=0):
    cache = KVCache(1, 1, 1, torch.float32, torch.device("cpu"), pages)
    cache.kept_bytes = kept_pages * cache.page_bytes
    return cache


def text_of(*symbols, tail=7):
    """A page of each symbol, and a token behind them."""
    return [symbol for symbol in symbols for _ in range(PAGE_SIZE)] + [tail]


def begin(cache, text, sharing=EVERYBODY, filled=True):
    return cache.allocate_with_prefix(len(text) + 1, text, sharing, filled)
