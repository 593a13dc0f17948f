"""The engine: load -> prefill -> [ draft -> verify -> accept -> compact ]* -> detokenise.

A chain is a tree and plain decoding is the root-only tree, so there is one loop for every drafter, every batch size and
both ways of delivery.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path

from specengine.cache.prefix_cache import Sharing
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters import Drafter, check_chains, check_offers, load_drafter
from specengine.engine.batch import Batch
from specengine.engine.device.buffers import Slots
from specengine.engine.device.memory_budget import ResidentOptions, resident_cache, resident_cycles
from specengine.engine.device.runner import DeviceBatch, DeviceCycles
from specengine.engine.metrics import Metrics
from specengine.engine.prompts import as_prompts, encode_prompt
from specengine.engine.request import Sequence
from specengine.engine.scheduler import Cohort
from specengine.models.transformer import TargetOutput
from specengine.rules import Rule, parse_rule
from specengine.tensor_parallel.loading import MOST_PROCESSES, LoadedModel, load_model
from specengine.types import Outputs, Prompt, SamplingParams, StreamEvent
from specengine.utils.cuda_graphs import stream_of
from specengine.utils.fair_lock import Turns
from specengine.utils.spec_string import check_range


class Engine:
    """One target, one drafter, one rule; safe to call from several threads.

    model: `smollm2-135m`, a checkpoint folder, a GGUF file, `random:<preset>`, a hub name, or a LoadedModel.
    drafter: `NAME[:PATH][,option=value...]`, `auto`, or a Drafter made for this model's target.
    rule: `NAME[:option=value,...]` or a Rule; see specengine.rules.
    device: `auto` (CUDA where there is a GPU), `cpu` or `cuda`.
    dtype: `auto` (what the checkpoint has, quantised or not), `float32`, `float16`, `bfloat16`, `int8` or `int4`.
    max_batch_size: sequences that share a cycle; more wait their turn. It does not change what they say.
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
        self.drafter.check_tokenizer(self.tokenizer)
        check_offers(self.drafter, self.rule.name, self.rule.wants)
        check_chains(self.drafter, self.rule)
        self.max_batch_size = max_batch_size
        self._target = self.model.target.with_taps(self.drafter.taps)
        self._cycles: DeviceCycles | None = None
        if self.model.target.ops.resident:
            options = ResidentOptions(max_batch_size, gpu_memory_fraction, graphs)
            self.cache = resident_cache(self.model, self.drafter, self.rule, options)
            with stream_of(self.model.target.device):
                self._cycles = resident_cycles(self.model, self.drafter, self.rule, self._cycle, options)
        else:
            self.cache = self.model.target.new_cache()
            self.cache.kept_bytes = prefix_cache_mib << 20
            self.drafter.attach(self.cache)
        about = {"model": self.model.name, "drafter": self.drafter.name, "rule": self.rule.name}
        self.metrics = Metrics(self.cache, about)
        self._sharing = Sharing.under(self.model.target.ops) if prefix_cache_mib else None
        self._turns = Turns()  # one prefill pass or one cycle each: concurrent calls advance side by side

    @property
    def healthy(self) -> bool:
        """Whether it can serve requests: false for good once a process of tensor_parallel failed."""
        return self.model.target.failure is None

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Outputs:
        """Continues prompts: strings, lists of token ids, or lists of chat messages ({"role", "content"}).

        One prompt gives one output; a list of prompts gives a list in the same order; n > 1 gives a list of n outputs
        in place of each output. params: one for all or one per prompt. Raises ValueError naming what is wrong with a
        prompt or parameter before anything is generated.
        """
        groups, single = self._groups(prompts, params)
        for _ in self._run([sequence for group in groups for sequence in group]):
            pass
        return self._results(groups, single)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamEvent, None, None]:
        """Continues one prompt, yielding an event per cycle; the last one carries the whole output (n must be 1)."""
        sequence = self._streamed(prompt, params)
        return (sequence.take_event(self.rule) for _ in self._run([sequence]))

    def _streamed(self, prompt: Prompt, params: SamplingParams | None) -> Sequence:
        """The sequence of stream()'s arguments."""
        prompts, single = as_prompts(prompt)
        if not single:
            raise ValueError("prompt: stream() takes one prompt, got a list of prompts")
        (params,) = _one_each(params, 1)
        if params.n != 1:
            raise ValueError(f"n: stream() takes n=1, got {params.n}")
        (sequence,) = self._sequences(prompts[0], params)
        return sequence

    def _groups(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> tuple[list[list[Sequence]], bool]:
        """The sequences of each prompt, and whether it was a single one."""
        prompts, single = as_prompts(prompts)
        groups = [self._sequences(p, s) for p, s in zip(prompts, _one_each(params, len(prompts)), strict=True)]
        return groups, single

    def _results(self, groups: Seq[Seq[Sequence]], single: bool) -> Outputs:
        """What generate() returns of sequences that ended."""
        outputs = [[s.output(s.take_text(), self.rule) for s in group] for group in groups]
        results = [out[0] if group[0].params.n == 1 else out for group, out in zip(groups, outputs, strict=True)]
        return results[0] if single else results

    def _sequences(self, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """The n sequences of a prompt, checked against the model."""
        ids = encode_prompt(prompt, self.tokenizer, self.model.config)
        self.model.check_params(params)
        if self._cycles:
            self._cycles.state.check_biases(params)
        limit = min(params.max_new_tokens, self.model.config.max_position - len(ids))
        sequences = [
            Sequence(list(ids), params, params.seed + i, limit, self.model.eos_token_ids, self.tokenizer)
            for i in range(params.n)
        ]
        self.cache.check_fits(self._slots(sequences[0]))
        return sequences

    def _run(self, sequences: Seq[Sequence]) -> Iterator[None]:
        """Runs sequences to their end, at most max_batch_size at a time; yields after every cycle."""
        cohort = Cohort(self)
        cohort.submit(sequences)
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

    def _batch(self, sequences: Seq[Sequence]) -> Batch | DeviceBatch:
        if self._cycles:
            return self._cycles.batch(sequences)
        return Batch(
            sequences, self.cache, self.model.config.vocab_size, self._cycle, self.model.target.device, self.rule
        )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The caller's turn, on the stream of the device whatever the thread."""
        with self._turns, stream_of(self.model.target.device):
            yield

    def _slots(self, sequence: Sequence) -> int:
        """Slots of the cache that a sequence may come to need."""
        return sequence.prompt_length + sequence.limit + self.drafter.spare_slots

    def _admit(self, sequence: Sequence, active: Seq[Sequence]) -> bool:
        """Whether there is room for one more sequence."""
        fits = not self._cycles or self._cycles.state.has_room([*active, sequence])
        return fits and self.cache.has_room(self._slots(sequence))

    def _place(self, sequence: Sequence, batch: int) -> None:
        """Gives a sequence its pages, in the same turn in which there was room for it. batch: as large as it will be.

        Their first ones may be those of earlier prompts and answers that begin alike.
        """
        sequence.sharing = self._sharing
        # What later texts find of one saves more than its drafter's reading takes, and they may be drafted.
        sequence.unread = self._sharing is None and self.drafter.leaves_unread(batch)
        text, slots = sequence.tokens[:-1], self._slots(sequence)
        sequence.pages, sequence.prefix_hit = self.cache.begin(slots, text, sequence.sharing)

    def _prefill(self, sequence: Sequence) -> Iterator[int]:
        """Caches a sequence's prompt but the last token, which is the first cycle's root.

        What other prompts and answers have cached of it is not passed again. Yields the rows of each pass.
        """
        begin = time.perf_counter()
        target, step, prompt = self._target, self._target.ops.prefill_rows, sequence.tokens[:-1]
        target.ensure_positions(sequence.prompt_length + sequence.limit)
        for start in range(sequence.prefix_hit, len(prompt), step):
            rows = TreeBatch.chains([prompt[start : start + step]], target.device)
            with self._turn():
                features = target.features(rows, self.cache, self.cache.batch([sequence.pages], [start]))
                self.drafter.observe_prompt(sequence, start, features)
                sequence.cached = min(start + step, len(prompt))
                self.cache.share(sequence.pages, self._shared_text(sequence), sequence.sharing)
            yield len(rows.tokens)
        sequence.started = time.perf_counter()
        sequence.prefill_seconds = sequence.started - begin

    def _cycle(self, batch: Batch | Slots) -> None:
        """One round: every sequence of the batch commits its accepted tokens and the bonus token."""
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
        batch.observe(self.drafter, out.features)
        batch.mark("draft")

    def _forward(self, tree: TreeBatch, batch: Batch | Slots) -> TargetOutput:
        return self._target.forward(tree, self.cache, batch.cache, greedy=not batch.reads_logits)

    def _release(self, sequences: Iterable[Sequence]) -> None:
        # Takes no turn: the garbage collector may close an abandoned stream in the middle of a cycle of this thread.
        for sequence in sequences:
            text = self._shared_text(sequence)
            self.drafter.release(sequence)  # first: who gets the target's pages may count on the drafter's
            self.cache.free(sequence.pages, text, sequence.sharing)
            sequence.pages, sequence.cached = [], 0

    def _shared_text(self, sequence: Sequence) -> list[int]:
        return sequence.shared_text(self.drafter.filled(sequence))


def _one_each(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Seq) and len(params) == count and all(isinstance(p, SamplingParams) for p in params):
        return list(params)
    raise ValueError(f"params: expected one SamplingParams or {count} of them, one per prompt, got {params!r}")
