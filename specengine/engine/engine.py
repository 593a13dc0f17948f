"""The engine: a facade over the loaded model, the drafter, the rule and the scheduler."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from specengine.cache.kv_cache import KVCache
from specengine.drafters import Drafter, check_chains, check_offers, load_drafter
from specengine.engine.core import CoreOptions, EngineCore
from specengine.engine.cycle import Cycle
from specengine.engine.metrics import Metrics
from specengine.engine.prompts import as_prompts, encode_prompt
from specengine.engine.request import Request
from specengine.engine.request_group import RequestGroup
from specengine.engine.scheduler import Scheduler
from specengine.models.lora.adapters import Adapter, Adapters, load_adapters
from specengine.rules import Rule, parse_rule
from specengine.tensor_parallel.loading import MOST_PROCESSES, LoadedModel, load_model
from specengine.types import Outputs, Prompt, SamplingParams, StreamEvent
from specengine.utils.fair_lock import FairLock
from specengine.utils.forks import check_not_forked
from specengine.utils.interrupts import DeferredSignals
from specengine.utils.spec_string import check_range


class Engine:
    """Runs one target with one drafter and one rule; several threads may call it.

    model: `smollm2-135m`, a checkpoint folder, a GGUF file, `random:<preset>`, a hub name, or a LoadedModel.
    drafter: `NAME[:PATH][,option=value...]`, `auto`, or a Drafter made for this model's target.
    rule: `NAME[:option=value,...]` or a Rule; see specengine.rules.
    device: `auto` (CUDA where there is a GPU), `cpu` or `cuda`.
    dtype: `auto` (as the checkpoint has it, quantised or not), `auto-float32` (likewise, and codes
        multiply rows of floats), `float32`, `float16`, `bfloat16`, `int8` or `int4`.
    max_batch_size: requests that share a cycle; further ones wait. No text depends on it.
    prefix_cache_mib: MiB of unused keys and values kept for later prompts that begin alike; 0 keeps none. On CUDA any
      other value keeps what the pool has free. No text depends on it.
    gpu_memory_fraction: share of the GPU's memory for weights, workspaces and cache; CUDA only.
    graphs: captures cycles as CUDA graphs; False runs the same code call by call, for debugging. CUDA only.
    strict: makes speculative output equal plain output bit for bit, at a cost in speed; the CPU always does.
    tensor_parallel: processes that share the model's layers, on CUDA each with a GPU of its own. A LoadedModel keeps
      its own number. After one process fails, requests raise RankFailed.
    adapters: names of PEFT LoRA folders of the target, for SamplingParams.adapter, or loaded Adapters.
    The attribute `metrics` counts requests, tokens and times.
    Raises ValueError for an argument that it cannot honour, FileNotFoundError for a missing file. In the child of a
    fork, it and its calls raise RuntimeError where the parent had loaded a model.
    """

    cycle_type: ClassVar[type[Cycle]] = Cycle

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m",
        *,
        drafter: str | Drafter = "auto",
        rule: str | Rule = "match",
        device: str = "auto",
        dtype: str = "auto",
        max_batch_size: int = 16,
        prefix_cache_mib: int = 256,
        gpu_memory_fraction: float = 0.9,
        graphs: bool = True,
        strict: bool = False,
        tensor_parallel: int = 1,
        adapters: Mapping[str, str | Path] | Adapters | None = None,
    ) -> None:
        check_not_forked()
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 1:
            raise ValueError(f"max_batch_size: expected a positive integer, got {max_batch_size!r}")
        check_range("prefix_cache_mib", prefix_cache_mib, 0, 1 << 24)
        check_range("tensor_parallel", tensor_parallel, 1, MOST_PROCESSES)
        self.rule = parse_rule(rule)
        if isinstance(model, LoadedModel):
            model.check_place(device, dtype, strict, tensor_parallel)
            self.model = model
        else:
            self.model = load_model(model, device=device, dtype=dtype, strict=strict, tensor_parallel=tensor_parallel)
        if adapters is None or isinstance(adapters, Adapters):
            self.adapters = adapters
        else:
            self.adapters = load_adapters(adapters, self.model.target)
        if self.adapters is not None:
            self.adapters.check_fits(self.model.target)
        self.tokenizer = self.model.tokenizer
        self.drafter = drafter if isinstance(drafter, Drafter) else load_drafter(drafter, self.model.target)
        self.drafter.check_tokenizer(self.tokenizer)
        check_offers(self.drafter, self.rule.name, self.rule.wants)
        check_chains(self.drafter, self.rule)
        self.max_batch_size = max_batch_size
        options = CoreOptions(max_batch_size, prefix_cache_mib, gpu_memory_fraction, graphs)
        self.core = EngineCore(self.model, self.drafter, self.rule, options, self.cycle_type, self.adapters)

    @property
    def cache(self) -> KVCache:
        """The target's key/value cache."""
        return self.core.cache

    @property
    def metrics(self) -> Metrics:
        """Counters of requests, tokens and times."""
        return self.core.metrics

    @property
    def healthy(self) -> bool:
        """Whether it can serve requests; False for good after a process of tensor_parallel failed."""
        return self.model.target.failure is None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Outputs:
        """Continues prompts: strings, lists of token ids, or lists of chat messages ({"role", "content"}).

        One prompt gives one output, a list of prompts a list in the same order; n > 1 gives a list of n outputs in
        place of each output. params: one for all or one per prompt. Raises ValueError naming the prompt or parameter
        before anything is generated, and GenerationFailed once all others have ended, where a request fails midway: its
        scores are not numbers (NoToken), or its constraint cannot go on (ConstraintFailed).
        """
        group = self.prepare(prompts, params)
        for _ in self._run(group.requests):
            pass
        return group.outputs(self.rule)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamEvent, None, None]:
        """Continues one prompt and yields an event per cycle; the last event carries the output. n must be 1."""
        group = self.prepare(prompt, params)
        if not group.single:
            raise ValueError("prompt: stream() takes one prompt, got a list of prompts")
        (requests,) = group.samples
        if len(requests) != 1:
            raise ValueError(f"n: stream() takes n=1, got {len(requests)}")
        (request,) = requests
        return (request.take_event(self.rule) for _ in self._run([request]))

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        max_requests: float = math.inf,
    ) -> RequestGroup:
        """Makes the requests of a call without running them. Raises ValueError as generate() does.

        max_requests: places of batch and queue; a call of more requests is refused before any of them is made.
        """
        check_not_forked()
        listed, single = as_prompts(prompts)
        each = _one_each(params, len(listed))
        if (count := sum(own.n for own in each)) > max_requests:
            raise ValueError(f"prompts: {count} requests never fit into the {max_requests} places of batch and queue")
        pairs = zip(listed, each, strict=True)
        return RequestGroup([self._requests(prompt, own) for prompt, own in pairs], single)

    @contextmanager
    def timed_phases(self) -> Iterator[list[dict[str, float]]]:
        """Measures cycles on the device: each waits for the one before, and adds the seconds of its phases to the list.

        Raises ValueError where cycles run on the host.
        """
        if not self.core.runner:
            raise ValueError("device: only cycles on the device have clocks of their own")
        with self.core.runner.timed() as timings:
            yield timings

    def share_lock(self, lock: FairLock) -> None:
        """Makes engines take turns: two at once would each run on fewer threads than they have measured.

        Engines on a device always do.
        """
        self.core.lock = lock

    def _requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Makes the n requests of a prompt."""
        ids = encode_prompt(prompt, self.tokenizer, self.model.config)
        self.model.check_params(params)
        constraint = self.model.grammars.constraint(params)  # reads the whole schema, so once for all samples
        constraints = [constraint, *(constraint and constraint.fresh() for _ in range(1, params.n))]
        adapter = self._find_adapter(params.adapter)
        limit = min(params.max_new_tokens, self.model.config.max_position - len(ids))
        requests = [
            Request(
                list(ids),
                params,
                params.seed + i,
                limit,
                self.model.eos_token_ids,
                self.tokenizer,
                adapter=adapter,
                constraint=constraint,
            )
            for i, constraint in enumerate(constraints)
        ]
        self.core.check_fits(requests[0])
        return requests

    def _find_adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if self.adapters is None:
            raise ValueError(f"adapter: this engine has none, got {name[:100]!r}")
        return self.adapters.find(name)

    def _run(self, requests: Sequence[Request]) -> Iterator[None]:
        """Runs requests to their end and yields after every cycle. Handlers of signals run between two passes."""
        with DeferredSignals() as signals:
            scheduler = Scheduler(self.core, pauses=lambda: signals.pending)
            try:
                scheduler.add(requests)
                while scheduler.has_unfinished_requests:
                    stepped = scheduler.step()
                    with signals.allowed():
                        if stepped and not any(request.failure for request in requests):
                            yield
                for request in requests:
                    if request.failure:
                        raise request.failure
            finally:
                scheduler.close()


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Sequence) and len(params) == count and all(isinstance(p, SamplingParams) for p in params):
        return list(params)
    raise ValueError(f"params: expected one SamplingParams or {count} of them, one per prompt, got {params!r}")
