"""What an engine on the device needs, planned once at start: workspaces, then pages with what is left."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import KVCache
from specengine.drafters.base import Drafter
from specengine.drafters.capabilities import (
    CacheCompanion,
    DeviceDrafter,
    DeviceStateDrafter,
    LogitsDrafter,
    NetworkDrafter,
)
from specengine.engine.device.buffers import DeviceBuffers, GraphBatch
from specengine.engine.device.cycle_graphs import MAX_ROWS, CycleGraphs
from specengine.engine.device.runner import DeviceRunner
from specengine.models.transformer import Transformer
from specengine.rules import Rule, Wants
from specengine.rules.lossless import Match
from specengine.tensor_parallel.loading import LoadedModel
from specengine.utils.spec_string import check_range

RESERVE_BYTES = 1 << 30  # for what libraries take: context, cuBLAS, graphs
SIMULATED_PAGES = 256  # where no GPU says how much memory there is

_caches: weakref.WeakKeyDictionary[Transformer, KVCache] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class DeviceOptions:
    """The arguments of Engine of the same names."""

    max_batch_size: int
    gpu_memory_fraction: float
    graphs: bool

    def __post_init__(self) -> None:
        check_range("max_batch_size", self.max_batch_size, 1, MAX_ROWS)
        fraction = self.gpu_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(f"gpu_memory_fraction: expected a number above 0 and at most 1, got {fraction!r}")
        if not isinstance(self.graphs, bool):
            raise ValueError(f"graphs: expected True or False, got {self.graphs!r}")


def device_cache(model: LoadedModel, drafter: Drafter, rule: Rule, options: DeviceOptions) -> KVCache:
    """The cache that all engines of a model share: a pool that never moves. The drafter gets its share of the memory.

    Raises ValueError where the GPU has no room for it behind weights and workspaces.
    """
    with _lock:
        if model.target not in _caches:
            longest = model.config.max_position + drafter.spare_slots
            useful = options.max_batch_size * -(-longest // PAGE_SIZE)
            rows = min(MAX_ROWS, options.max_batch_size * drafter.max_nodes)
            pages = _pages(model.target, drafter, rule, rows, options.gpu_memory_fraction)
            _caches[model.target] = model.target.new_cache(min(useful, pages))
        cache = _caches[model.target]
        if not isinstance(drafter, CacheCompanion):
            return cache
        try:
            drafter.attach(cache)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"gpu_memory_fraction: an earlier engine of this model took the memory that drafter {drafter.name} "
                f"needs ({drafter.page_bytes * cache.k.shape[1] / 2**30:.1f} GiB); make the engine that has it first"
            ) from error
        return cache


def device_runner(
    model: LoadedModel, drafter: Drafter, rule: Rule, cycle: Callable[[GraphBatch], None], options: DeviceOptions
) -> DeviceRunner:
    """An engine's state on the device and its captured cycles."""
    config, target = model.config, model.target
    target.ensure_positions(config.max_position)  # a captured graph holds on to the tables
    rows = min(MAX_ROWS, options.max_batch_size * drafter.max_nodes)
    state = DeviceBuffers(
        slots=options.max_batch_size,
        positions=config.max_position,
        spare=drafter.spare_slots,
        rows=rows,
        vocab=config.vocab_size,
        eos=sorted(model.eos_token_ids),
        device=target.device,
        draft_logits=drafter.room_for_logits(rows)
        if rule.wants is not Wants.NOTHING and isinstance(drafter, LogitsDrafter)
        else None,
        weights=not isinstance(rule, Match),
        drafter_state=drafter.new_device_state(options.max_batch_size)
        if isinstance(drafter, DeviceStateDrafter)
        else None,
    )
    target.tune(drafter.projections if isinstance(drafter, NetworkDrafter) else ())
    capture = options.graphs and target.device.type == "cuda"
    on_device = isinstance(drafter, DeviceDrafter)
    widths = {"adaptive": drafter.adaptive, "fixed": on_device and not drafter.adaptive}
    graphs = CycleGraphs(state, cycle, drafter.max_nodes, capture=capture, **widths)
    return DeviceRunner(state, graphs, drafter, rule.wants)


def pages_left(free: int, total: int, fraction: float, workspace: int, page: int) -> int:
    """Pages of `page` bytes that fit in `fraction` of a GPU of `total` bytes, `free` of them, beside a workspace.

    Raises ValueError with the numbers where there is room for none.
    """
    left = int(total * fraction) - (total - free) - workspace
    if left < page:
        used, size, work = ((x / 2**30) for x in (total - free, total, workspace))
        raise ValueError(
            f"gpu_memory_fraction: {fraction} of {size:.1f} GiB leaves no room for the cache: "
            f"{used:.1f} GiB are in use (weights included), workspaces take {work:.1f} GiB"
        )
    return left // page


def _pages(target: Transformer, drafter: Drafter, rule: Rule, rows: int, fraction: float) -> int:
    if target.device.type != "cuda":
        return SIMULATED_PAGES
    c = target.config
    most = max(rows, target.ops.prefill_rows)
    activations = 4 * most * (4 * c.hidden_size + 3 * c.intermediate_size + 4 * c.num_heads * c.head_dim)
    splits = 128  # of attention over the longest context there may be, in float32
    attention = 4 * rows * c.num_heads * (c.head_dim + 2) * splits
    logits = 4 * 4 * rows * c.vocab_size  # every captured width keeps its own: twice the widest, and as much under way
    if rule.wants is not Wants.NOTHING and not isinstance(drafter, DeviceDrafter):
        logits += 3 * 4 * rows * c.vocab_size  # the draft's: by level, all of them, where the cycle reads them
    workspace = RESERVE_BYTES + 2 * activations + attention + logits
    gc.collect()  # an engine that was dropped may hold a cache and graphs until now
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(target.device)
    own = drafter.page_bytes if isinstance(drafter, CacheCompanion) else 0
    return pages_left(free, total, fraction, workspace, target.new_cache(0).page_bytes + own)
