"""The engine: load -> prefill -> [ draft -> verify -> accept -> compact ]* -> detokenise.

A chain is a tree and plain decoding is the root-only tree, so there is one loop for every drafter, every batch size and
both ways of delivery.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specengine.cache.prefix_cache import Sharing
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters import Drafter, check_chains, check_offers, load_drafter
from specengine.drafters.capabilities import CacheCompanion, HiddenStateReader, PromptObserver, TokenizerChecker
from specengine.engine.batch import Batch
from specengine.engine.device.buffers import GraphBatch
from specengine.engine.device.memory_budget import DeviceOptions, device_cache, device_runner
from specengine.engine.device.runner import DeviceBatch, DeviceRunner
from specengine.engine.metrics import Metrics
from specengine.engine.prompts import as_prompts, encode_prompt
from specengine.engine.request import Request
from specengine.engine.scheduler import Scheduler
from specengine.models.transformer import TargetOutput
from specengine.rules import Rule, parse_rule
from specengine.tensor_parallel.loading import MOST_PROCESSES, LoadedModel, load_model
from specengine.types import Outputs, Prompt, SamplingParams, StreamEvent
from specengine.utils.cuda_graphs import stream_of
from specengine.utils.fair_lock import FairLock
from specengine.utils.spec_string import check_range


class Engine:
    """One target, one drafter, one rule; safe to call from several threads.

    model: `smollm2-135m`, a checkpoint folder, a GGUF file, `random:<preset>`, a hub name, or a LoadedModel.
    drafter: `NAME[:PATH][,option=value...]`, `auto`, or a Drafter made for this model's target.
    rule: `NAME[:option=value,...]` or a Rule; see specengine.rules.
    device: `auto` (CUDA where there is a GPU), `cpu` or `cuda`.
    dtype: `auto` (what the checkpoint has, quantised or not), `float32`, `float16`, `bfloat16`, `int8` or `int4`.
    max_batch_size: requests that share a cycle; more wait their turn. It does not change what they say.
    On CUDA: gpu_memory_fraction: of the GPU's memory, for weights and all else; the cache gets what is left of it.
    graphs: whether cycles are captured as CUDA graphs; without them the same code runs call by call, to be debugged.
    prefix_cache_mib: keys and values, in MiB, that are kept when nobody uses them: a prompt that begins like an earlier
      text is not read again so far. 0: none; on CUDA anything else means what the pool has free. It changes no token.
    strict: whether speculative output equals plain output bit for bit (on the CPU it always does); costs speed.
    tensor_parallel: processes that share the model's layers, on the CPU: this one and others that it starts. A
      LoadedModel keeps the number it was loaded with. Where one of them fails, requests raise RankFailed from then on.
    Its attribute `metrics` counts what it does.
    Raises ValueError for an argument it cannot honour, FileNotFoundError for a missing file.
    """

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
    ) -> None:
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
        self.tokenizer = self.model.tokenizer
        self.drafter = drafter if isinstance(drafter, Drafter) else load_drafter(drafter, self.model.target)
        if isinstance(self.drafter, TokenizerChecker):
            self.drafter.check_tokenizer(self.tokenizer)
        check_offers(self.drafter, self.rule.name, self.rule.wants)
        check_chains(self.drafter, self.rule)
        self.max_batch_size = max_batch_size
        layers = self.drafter.hidden_state_layers if isinstance(self.drafter, HiddenStateReader) else ()
        self._target = self.model.target.with_hidden_state_layers(layers)
        self._cycles: DeviceRunner | None = None
        if self.model.target.ops.resident:
            options = DeviceOptions(max_batch_size, gpu_memory_fraction, graphs)
            self.cache = device_cache(self.model, self.drafter, self.rule, options)
            with stream_of(self.model.target.device):
                self._cycles = device_runner(self.model, self.drafter, self.rule, self._cycle, options)
        else:
            self.cache = self.model.target.new_cache()
            self.cache.kept_bytes = prefix_cache_mib << 20
            if isinstance(self.drafter, CacheCompanion):
                self.drafter.attach(self.cache)
        about = {"model": self.model.name, "drafter": self.drafter.name, "rule": self.rule.name}
        self.metrics = Metrics(self.cache, about)
        self._sharing = Sharing.under(self.model.target.ops) if prefix_cache_mib else None
        self._turns = FairLock()  # one prefill pass or one cycle each: concurrent calls advance side by side

    @property
    def healthy(self) -> bool:
        """Whether it can serve requests: false for good once a process of tensor_parallel failed."""
        return self.model.target.failure is None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Outputs:
        """Continues prompts: strings, lists of token ids, or lists of chat messages ({"role", "content"}).

        One prompt gives one output; a list of prompts gives a list in the same order; n > 1 gives a list of n outputs
        in place of each output. params: one for all or one per prompt. Raises ValueError naming what is wrong with a
        prompt or parameter before anything is generated.
        """
        groups, single = self._groups(prompts, params)
        for _ in self._run([request for group in groups for request in group]):
            pass
        return self._results(groups, single)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamEvent, None, None]:
        """Continues one prompt, yielding an event per cycle; the last one carries the whole output (n must be 1)."""
        request = self._streamed(prompt, params)
        return (request.take_event(self.rule) for _ in self._run([request]))

    def _streamed(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """The request of stream()'s arguments."""
        prompts, single = as_prompts(prompt)
        if not single:
            raise ValueError("prompt: stream() takes one prompt, got a list of prompts")
        (params,) = _one_each(params, 1)
        if params.n != 1:
            raise ValueError(f"n: stream() takes n=1, got {params.n}")
        (request,) = self._requests(prompts[0], params)
        return request

    def _groups(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[list[Request]], bool]:
        """The requests of each prompt, and whether it was a single one."""
        prompts, single = as_prompts(prompts)
        groups = [self._requests(p, s) for p, s in zip(prompts, _one_each(params, len(prompts)), strict=True)]
        return groups, single

    def _results(self, groups: Sequence[Sequence[Request]], single: bool) -> Outputs:
        """What generate() returns of requests that ended."""
        outputs = [[s.output(s.take_text(), self.rule) for s in group] for group in groups]
        results = [out[0] if group[0].params.n == 1 else out for group, out in zip(groups, outputs, strict=True)]
        return results[0] if single else results

    def _requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """The n requests of a prompt, checked against the model."""
        ids = encode_prompt(prompt, self.tokenizer, self.model.config)
        self.model.check_params(params)
        if self._cycles:
            self._cycles.state.check_biases(params)
        limit = min(params.max_new_tokens, self.model.config.max_position - len(ids))
        requests = [
            Request(list(ids), params, params.seed + i, limit, self.model.eos_token_ids, self.tokenizer)
            for i in range(params.n)
        ]
        self.cache.check_fits(self._slots(requests[0]))
        return requests

    def _run(self, requests: Sequence[Request]) -> Iterator[None]:
        """Runs requests to their end, at most max_batch_size at a time; yields after every cycle."""
        cohort = Scheduler(self)
        cohort.submit(requests)
        try:
            while cohort.busy:
                if cohort.step():
                    yield
        finally:
            cohort.close()

    @contextmanager
    def timed_phases(self) -> Iterator[list[dict[str, float]]]:
        """For measurements where cycles run on the device: meanwhile they wait for each other, and each adds to the
        list the seconds its phases took there. Raises ValueError elsewhere."""
        if not self._cycles:
            raise ValueError("device: only cycles on the device have clocks of their own")
        with self._cycles.timed() as timings:
            yield timings

    def _batch(self, requests: Sequence[Request]) -> Batch | DeviceBatch:
        if self._cycles:
            return self._cycles.batch(requests)
        return Batch(
            requests, self.cache, self.model.config.vocab_size, self._cycle, self.model.target.device, self.rule
        )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The caller's turn, on the stream of the device whatever the thread."""
        with self._turns, stream_of(self.model.target.device):
            yield

    def _slots(self, request: Request) -> int:
        """GraphBatch of the cache that a request may come to need."""
        return request.prompt_length + request.limit + self.drafter.spare_slots

    def _admit(self, request: Request, active: Sequence[Request]) -> bool:
        """Whether there is room for one more request."""
        fits = not self._cycles or self._cycles.state.has_room([*active, request])
        return fits and self.cache.has_room(self._slots(request))

    def _place(self, request: Request, batch: int) -> None:
        """Gives a request its pages, in the same turn in which there was room for it. batch: as large as it will be.

        Their first ones may be those of earlier prompts and answers that begin alike.
        """
        request.sharing = self._sharing
        # What later texts find of one saves more than its drafter's reading takes, and they may be drafted.
        companion = self.drafter if isinstance(self.drafter, CacheCompanion) else None
        request.skips_drafter_cache = self._sharing is None and companion is not None and companion.skips_reading(batch)
        text, slots = request.tokens[:-1], self._slots(request)
        request.pages, request.prefix_hit = self.cache.begin(slots, text, request.sharing)

    def _prefill(self, request: Request) -> Iterator[int]:
        """Caches a request's prompt but the last token, which is the first cycle's root.

        What other prompts and answers have cached of it is not passed again. Yields the rows of each pass.
        """
        begin = time.perf_counter()
        target, step, prompt = self._target, self._target.ops.prefill_rows, request.tokens[:-1]
        target.ensure_positions(request.prompt_length + request.limit)
        for start in range(request.prefix_hit, len(prompt), step):
            rows = TreeBatch.chains([prompt[start : start + step]], target.device)
            with self._turn():
                hidden_states = target.hidden_states(rows, self.cache, self.cache.batch([request.pages], [start]))
                if isinstance(self.drafter, PromptObserver):
                    self.drafter.observe_prompt(request, start, hidden_states)
                request.cached = min(start + step, len(prompt))
                self.cache.share(request.pages, self._shared_text(request), request.sharing)
            yield len(rows.tokens)
        request.started = time.perf_counter()
        request.prefill_seconds = request.started - begin

    def _cycle(self, batch: Batch | GraphBatch) -> None:
        """One round: every request of the batch commits its accepted tokens and the bonus token."""
        target = self._target
        tree = batch.draft(self.drafter, self.rule)
        batch.mark("draft")
        out = self._forward(tree, batch)
        batch.mark("verify")
        accepted = target.ops.verify_tree(
            out.scores, tree, batch.params, batch.history, batch.workspace, self.rule, batch.draft_logits
        )
        batch.commit(tree, accepted, out.scores)
        batch.mark("accept")
        self.cache.compact(batch.cache, accepted, target.ops)
        batch.mark("compact")
        batch.observe(self.drafter, out.hidden_states)
        batch.mark("draft")

    def _forward(self, tree: TreeBatch, batch: Batch | GraphBatch) -> TargetOutput:
        return self._target.forward(tree, self.cache, batch.cache, greedy=not batch.reads_logits)

    def _release(self, requests: Iterable[Request]) -> None:
        # Takes no turn: the garbage collector may close an abandoned stream in the middle of a cycle of this thread.
        for request in requests:
            text = self._shared_text(request)
            self.drafter.release(request)  # first: who gets the target's pages may count on the drafter's
            self.cache.free(request.pages, text, request.sharing)
            request.pages, request.cached = [], 0

    def _shared_text(self, request: Request) -> list[int]:
        drafter = self.drafter
        return request.shared_text(
            drafter.filled(request) if isinstance(drafter, CacheCompanion) else len(request.tokens)
        )


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Sequence) and len(params) == count and all(isinstance(p, SamplingParams) for p in params):
        return list(params)
    raise ValueError(f"params: expected one SamplingParams or {count} of them, one per prompt, got {params!r}")
