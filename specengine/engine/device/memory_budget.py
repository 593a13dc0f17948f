"""Plans a GPU's memory once at start: weights, buffers, workspaces, then cache pages with what is left."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass

import torch

from specengine._C import MAX_NODES, PAGE_SIZE
from specengine.cache.kv_cache import KVCache
from specengine.cache.state_pool import fixed_slots
from specengine.drafters.drafter import Drafter
from specengine.engine.cycle import Cycle
from specengine.engine.device.buffers import BufferSizes, DeviceBuffers
from specengine.engine.device.cycle_graphs import MAX_ROWS, CycleGraphs, GraphOptions, captured_widths
from specengine.engine.device.runner import DeviceRunner
from specengine.models.config import ModelConfig
from specengine.models.transformer import Transformer
from specengine.rules import Rule
from specengine.rules.lossless import Match
from specengine.tensor_parallel.loading import LoadedModel
from specengine.utils.cuda_graphs import device_turn
from specengine.utils.spec_string import check_range

RESERVE_BYTES = 1 << 30  # for the CUDA context, cuBLAS and the graphs
SIMULATED_PAGES = 256  # of a cache on the simulator, which has no memory limit
ATTENTION_SPLITS = 128  # of attention over the longest context, each with float32 partial sums

_caches: weakref.WeakKeyDictionary[Transformer, KVCache] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class DeviceOptions:
    """The arguments of Engine with these names. Raises ValueError naming one that is out of range."""

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

    def rows(self, drafter: Drafter) -> int:
        """Returns the rows of the largest pass."""
        return min(MAX_ROWS, self.max_batch_size * drafter.max_nodes)

    def of_graphs(self, drafter: Drafter, rule: Rule, device: torch.device) -> GraphOptions:
        """Returns the options of an engine's cycles."""
        return GraphOptions(
            nodes=drafter.max_nodes,
            capture=self.graphs and device.type == "cuda",
            adaptive=drafter.adaptive,
            fixed=not drafter.adaptive and drafter.drafts_in_cycle,
        )


def device_cache(model: LoadedModel, drafter: Drafter, rule: Rule, options: DeviceOptions) -> KVCache:
    """Returns the pool that all engines of a model share; it never moves. Attaches the drafter to it.

    The engine's buffers are there already. Raises ValueError where the GPU has no room for the pool beside all else.
    """
    with _lock:
        if model.target not in _caches:
            longest = model.config.max_position + drafter.spare_slots
            useful = options.max_batch_size * -(-longest // PAGE_SIZE)
            pages = _affordable_pages(model.target, drafter, rule, options)
            _caches[model.target] = model.target.new_cache(min(useful, pages), options.max_batch_size)
        cache = _caches[model.target]
        try:
            drafter.attach(cache)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"gpu_memory_fraction: an earlier engine of this model took the memory that drafter {drafter.name} "
                f"needs ({drafter.page_bytes * cache.k.shape[1] / 2**30:.1f} GiB); make the engine that has it first"
            ) from error
        return cache


def device_runner(buffers: DeviceBuffers, cycle: Cycle, options: DeviceOptions) -> DeviceRunner:
    """Captures an engine's cycles, in turns: other engines may be running."""
    target, drafter = cycle.target, cycle.drafter
    with device_turn(target.device):
        target.tune(drafter.projections)
    graphs = CycleGraphs(buffers, cycle, options.of_graphs(drafter, cycle.rule, target.device))
    return DeviceRunner(buffers, graphs, drafter, cycle.rule.wants, target.graphs.wait_for, cycle.cache.states)


def device_buffers(
    model: LoadedModel, drafter: Drafter, rule: Rule, options: DeviceOptions, adapters: bool = False
) -> DeviceBuffers:
    """Makes an engine's buffers.  adapters: whether requests may have adapters."""
    config, target = model.config, model.target
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)  # another stream wrote the weights
    # Captured graphs hold on to the rotary tables, which no later engine may replace: the target's own layers draft
    # behind the end of the context too.
    target.ensure_positions(config.max_position + MAX_NODES)
    rows = options.rows(drafter)
    sizes = BufferSizes(
        slots=options.max_batch_size,
        positions=config.max_position,
        spare=drafter.spare_slots,
        rows=rows,
        vocab=config.vocab_size,
    )
    draft_logits, drafter_state = None, None
    if drafter.drafts_in_cycle:
        drafter_state = drafter.new_device_state(options.max_batch_size)
    elif drafter.gives_logits(rule.wants):
        draft_logits = drafter.room_for_logits(rows)
    return DeviceBuffers(
        sizes,
        sorted(model.eos_token_ids),
        target.device,
        draft_logits=draft_logits,
        weights=not isinstance(rule, Match),
        drafter_state=drafter_state,
        adapters=adapters,
        hybrid=config.gated_delta is not None,
    )


def pages_left(free: int, total: int, fraction: float, workspace: int, page: int) -> int:
    """Returns how many pages of `page` bytes fit in `fraction` of a GPU beside a workspace; sizes in bytes.

    Raises ValueError with the numbers where not even one fits.
    """
    left = int(total * fraction) - (total - free) - workspace
    if left < page:
        used, size, work = ((x / 2**30) for x in (total - free, total, workspace))
        raise ValueError(
            f"gpu_memory_fraction: {fraction} of {size:.1f} GiB leaves no room for the cache: "
            f"{used:.1f} GiB are in use (weights included), workspaces take {work:.1f} GiB"
        )
    return left // page


def _affordable_pages(target: Transformer, drafter: Drafter, rule: Rule, options: DeviceOptions) -> int:
    if target.device.type != "cuda":
        return SIMULATED_PAGES
    workspace = workspace_bytes(target, drafter, rule, options) + _state_bytes(target, options)
    gc.collect()  # a dropped engine may hold its cache and graphs until now
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(target.device)
    page = target.page_bytes + drafter.page_bytes
    return pages_left(free, total, options.gpu_memory_fraction, workspace, page)


def _state_bytes(target: Transformer, options: DeviceOptions) -> int:
    """Returns the bytes of the recurrent states of a hybrid's requests and of their copies."""
    states = target.new_cache(0, 0).states
    return 0 if states is None else fixed_slots(options.max_batch_size) * states.slot_bytes


def _mlp_columns(config: ModelConfig) -> int:
    """Returns the columns that a row has in the MLP of the widest layer: gate, up, their product; of each expert also
    its output, and the router's logits.
    """
    dense, moe = 3 * config.intermediate_size, config.moe
    if moe is None:
        return dense
    experts = moe.experts_per_token * (3 * moe.intermediate_size + config.hidden_size)
    return max(dense, 3 * moe.shared_size + experts + moe.num_experts)


def workspace_bytes(target: Transformer, drafter: Drafter, rule: Rule, options: DeviceOptions) -> int:
    """Returns the bytes that the cycles of an engine take beside its buffers."""
    c, rows = target.config, options.rows(drafter)
    drafted = options.max_batch_size * drafter.device_rows if drafter.drafts_in_cycle else 0
    most = max(rows, target.ops.prefill_rows, drafted)
    activations = 4 * most * (4 * c.hidden_size + _mlp_columns(c) + 4 * c.num_heads * c.head_dim)
    records = 0
    if (states := target.new_cache(0, 0).states) is not None:
        sizes = states.memory.config
        activations += 4 * most * (sizes.conv_channels + 2 * sizes.value_size + 2 * sizes.num_value_heads)
        records = max(states.record_bytes(rows), states.record_bytes(target.ops.prefill_rows) // len(sizes.layers))
    attention = 4 * rows * c.num_heads * (c.head_dim + 2) * ATTENTION_SPLITS
    # Of one pass: cycles share their memory and keep none of them. A drafter's own have log-probabilities beside them.
    logits = 4 * c.vocab_size * max(rows, 2 * drafted)
    if drafter.gives_logits(rule.wants):
        logits += 2 * 4 * rows * c.vocab_size  # draft logits: by level and of the tree; the cycle reads a buffer
    widths = captured_widths(options.max_batch_size, options.of_graphs(drafter, rule, target.device))
    kept = (
        4
        * c.hidden_size
        * (1 + len(drafter.hidden_state_layers))
        * sum(b * width for b, own in widths.items() for width in own)
    )
    return RESERVE_BYTES + 2 * activations + attention + records + logits + kept
