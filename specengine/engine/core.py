"""What all schedulers of an engine share: the model and its cache, the drafter, the rule, the lock and the counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from specengine.cache.prefix_cache import Sharing
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.forced import ForcedPolicy
from specengine.drafters.drafter import Drafter
from specengine.drafters.policies import expert_reads
from specengine.engine.batch import Batch
from specengine.engine.cycle import Cycle
from specengine.engine.device.device_batch import DeviceBatch
from specengine.engine.device.memory_budget import DeviceOptions, device_buffers, device_cache, device_runner
from specengine.engine.device.runner import DeviceRunner
from specengine.engine.metrics import Metrics
from specengine.engine.request import Request
from specengine.models.lora.adapters import Adapter, Adapters
from specengine.rules import Rule
from specengine.tensor_parallel.loading import LoadedModel
from specengine.utils.cuda_graphs import device_turn
from specengine.utils.fair_lock import FairLock
from specengine.utils.forks import check_not_forked


@dataclass(frozen=True)
class CoreOptions:
    """The arguments of Engine with these names."""

    max_batch_size: int
    prefix_cache_mib: int
    gpu_memory_fraction: float
    graphs: bool


class EngineCore:
    """Gives requests their pages, makes batches of them, and takes the pages back.

    cycle_type: runs the cycles.  adapters: that requests may choose, if any.
    """

    def __init__(
        self,
        model: LoadedModel,
        drafter: Drafter,
        rule: Rule,
        options: CoreOptions,
        cycle_type: type[Cycle] = Cycle,
        adapters: Adapters | None = None,
    ) -> None:
        self.model, self.drafter, self.rule = model, drafter, rule
        self.max_batch_size = options.max_batch_size
        bare = model.target if adapters is None else model.target.with_lora(adapters.layers)
        self.target = bare.with_hidden_state_layers(drafter.hidden_state_layers)
        self.adapters = adapters
        self.runner: DeviceRunner | None = None
        if model.target.ops.on_device:
            device_options = DeviceOptions(options.max_batch_size, options.gpu_memory_fraction, options.graphs)
            with device_turn(self.target.device):
                buffers = device_buffers(model, drafter, rule, device_options, adapters is not None)
                self.cache = device_cache(model, drafter, rule, device_options)
            self.cycle = cycle_type(self.target, self.cache, drafter, rule)
            self.runner = device_runner(buffers, self.cycle, device_options)
        else:
            self.cache = model.target.new_cache()
            self.cache.kept_bytes = options.prefix_cache_mib << 20
            if self.cache.states:
                self.cache.states.most_kept = self.cache.kept_bytes // self.cache.states.slot_bytes
            drafter.attach(self.cache)
            self.cycle = cycle_type(self.target, self.cache, drafter, rule)
        self._forced = ForcedPolicy(CycleCosts(experts=expert_reads(model.target)))
        self.sharing = Sharing.under(model.target.ops) if options.prefix_cache_mib else None
        self._sharing_by_adapter: dict[Adapter, Sharing] = {}
        self.metrics = Metrics(self.cache, {"model": model.name, "drafter": drafter.name, "rule": rule.name})
        self.lock = FairLock()

    def turn(self) -> AbstractContextManager[None]:
        """Returns the lock of one prefill pass or one cycle; on a device the turn of all its engines.

        Raises RuntimeError in a forked child, which may hold a stream that its parent began.
        """
        check_not_forked()
        return device_turn(self.target.device) if self.runner else self.lock

    def check_fits(self, request: Request) -> None:
        """Raises ValueError where the cache or the device's buffers can never hold a request."""
        if self.runner:
            self.runner.buffers.check_biases(request.params)
        self.cache.check_fits(self._slots(request))

    def has_room(self, request: Request, running: Sequence[Request]) -> bool:
        """Returns whether there are pages and buffers for one more request now."""
        fits = not self.runner or self.runner.buffers.has_room([*running, request])
        return fits and self.cache.has_room(self._slots(request))

    def allocate(self, request: Request, batch_size: int) -> None:
        """Gives a request its pages; the first ones may hold the beginning of earlier prompts and answers.

        batch_size: requests that the batch will have. To be called in the turn in which has_room() was true.
        """
        request.sharing = self.sharing_of(request.adapter)
        drawn = self.drafter.gives_logits(self.rule.wants)  # such trees follow no policy
        request.drafter_reads = drawn or self.drafter.reads(len(request.tokens), request.limit, batch_size)
        request.pages, request.stats.prefix_hit = self.cache.allocate_with_prefix(
            self._slots(request), request.tokens[:-1], request.sharing, request.drafter_reads
        )

    def sharing_of(self, adapter: Adapter | None) -> Sharing | None:
        """Returns what requests of one adapter share pages by: their keys and values are no other adapter's."""
        if self.sharing is None or adapter is None:
            return self.sharing
        return self._sharing_by_adapter.setdefault(adapter, Sharing.under(self.model.target.ops))

    def make_batch(self, requests: Sequence[Request]) -> Batch | DeviceBatch:
        """Makes the batch of these requests, on the device where cycles run there."""
        return self.runner.batch(requests) if self.runner else Batch(requests, self.cycle, self._forced)

    def share_pages(self, request: Request) -> None:
        """Lets other requests find the full pages of a request."""
        self.cache.share(request.pages, self._shareable(request), request.sharing, request.drafter_reads)

    def release(self, requests: Iterable[Request]) -> None:
        """Hands drafter state and pages back: first Drafter.release, then KVCache.free, which only queues the pages.

        The cache takes queued pages back when it next allocates, is asked for room, or counts its pages.
        Takes no lock: the garbage collector may close an abandoned stream in the middle of a cycle of this thread.
        """
        for request in requests:
            tokens = self._shareable(request)
            self.drafter.release(request)  # before the pages: their next owner may rely on the drafter's pages too
            request.drafter_states.clear()  # a request may wait long for the others of its call
            self.cache.free(request.pages, tokens, request.sharing, request.drafter_reads)
            request.pages, request.cached = [], 0

    def rest(self) -> None:
        """Gives unused memory of the cache back to the system, if no request runs."""
        self.cache.rest()

    def _shareable(self, request: Request) -> list[int]:
        """Returns the text of the pages to share; where the drafter reads the request, of those it has filled."""
        return request.shareable_tokens(self.drafter.filled(request) if request.drafter_reads else len(request.tokens))

    def _slots(self, request: Request) -> int:
        """The cache slots that a request may come to need."""
        return request.prompt_length + request.limit + self.drafter.spare_slots
