"""The engine: load -> prefill -> [ draft -> verify -> accept -> compact ]* -> detokenise.

A chain is a tree and plain decoding is the root-only tree, so there is one loop for every drafter, every batch size and
both ways of delivery.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

from specengine.batch import Batch
from specengine.drafters import load_drafter
from specengine.models.loading import LoadedModel, load_model
from specengine.prompts import as_prompts, encode_prompt
from specengine.rules import parse_rule
from specengine.sequence import Sequence
from specengine.tree import TreeBatch
from specengine.turns import Turns
from specengine.types import GenerationOutput, Prompt, SamplingParams, StreamEvent

PREFILL_ROWS = 256  # rows of one prefill pass: enough to be bound by arithmetic, few enough to stay in cache


class Engine:
    """One target, one drafter, one rule; safe to call from several threads.

    model: `smollm2-135m`, a checkpoint folder, a GGUF file, `random:<preset>`, a hub name, or a LoadedModel.
    drafter: `NAME[:PATH][,option=value...]`, or `auto`.  rule: `match`.
    device: `auto` (the CPU, for now), `cpu` or `cuda`.
    dtype: `auto` (what the checkpoint has, quantised or not), `float32`, `float16`, `bfloat16`, `int8` or `int4`.
    max_batch_size: sequences that share a cycle; more wait their turn. It does not change what they say.
    Raises ValueError for an argument it cannot honour, FileNotFoundError for a missing file.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m",
        *,
        drafter: str = "auto",
        rule: str = "match",
        device: str = "auto",
        dtype: str = "auto",
        max_batch_size: int = 16,
    ) -> None:
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 1:
            raise ValueError(f"max_batch_size: expected a positive integer, got {max_batch_size!r}")
        self.rule = parse_rule(rule)
        if isinstance(model, LoadedModel):
            model.check_place(device, dtype)
            self.model = model
        else:
            self.model = load_model(model, device=device, dtype=dtype)
        self.tokenizer = self.model.tokenizer
        self.drafter = load_drafter(drafter, self.model.target)
        self.cache = self.model.target.new_cache()
        self.max_batch_size = max_batch_size
        self._turns = Turns()  # one prefill pass or one cycle each: concurrent calls advance side by side

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> GenerationOutput | list[GenerationOutput] | list[list[GenerationOutput]]:
        """Continues prompts: strings, lists of token ids, or lists of chat messages ({"role", "content"}).

        One prompt gives one output; a list of prompts gives a list in the same order; n > 1 gives a list of n outputs
        in place of each output. params: one for all or one per prompt. Raises ValueError naming what is wrong with a
        prompt or parameter before anything is generated.
        """
        prompts, single = as_prompts(prompts)
        groups = [self._sequences(p, s) for p, s in zip(prompts, _one_each(params, len(prompts)), strict=True)]
        for _ in self._run([sequence for group in groups for sequence in group]):
            pass
        outputs = [[s.output(s.take_text()) for s in group] for group in groups]
        results = [out[0] if group[0].params.n == 1 else out for group, out in zip(groups, outputs, strict=True)]
        return results[0] if single else results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Continues one prompt, yielding an event per cycle; the last one carries the whole output (n must be 1)."""
        prompts, single = as_prompts(prompt)
        if not single:
            raise ValueError("prompt: stream() takes one prompt, got a list of prompts")
        (params,) = _one_each(params, 1)
        if params.n != 1:
            raise ValueError(f"n: stream() takes n=1, got {params.n}")
        (sequence,) = self._sequences(prompts[0], params)
        return self._events(sequence)

    def _events(self, sequence: Sequence) -> Iterator[StreamEvent]:
        text, seen = "", sequence.prompt_length
        for _ in self._run([sequence]):
            piece, new = sequence.take_text(), sequence.tokens[seen:]
            text, seen = text + piece, len(sequence.tokens)
            output = sequence.output(text) if sequence.finish_reason else None
            yield StreamEvent(piece, new, sequence.accepted_last, output)

    def _sequences(self, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """The n sequences of a prompt, checked against the model."""
        ids = encode_prompt(prompt, self.tokenizer, self.model.config)
        self.model.check_params(params)
        limit = min(params.max_new_tokens, self.model.config.max_position - len(ids))
        return [
            Sequence(list(ids), params, params.seed + i, limit, self.model.eos_token_ids, self.tokenizer)
            for i in range(params.n)
        ]

    def _run(self, sequences: Seq[Sequence]) -> Iterator[None]:
        """Runs sequences to their end, at most max_batch_size at a time; yields after every cycle."""
        waiting, active = deque(sequences), []
        batch = None
        try:
            while waiting or active:
                while waiting and len(active) < self.max_batch_size:
                    active.append(waiting.popleft())
                    self._prefill(active[-1])
                    batch = None
                with self._turns:
                    batch = batch or Batch(active, self.cache, self.model.config.vocab_size)
                    self._cycle(batch)
                if any(s.finish_reason for s in active):
                    self._release(s for s in active if s.finish_reason)
                    active = [s for s in active if not s.finish_reason]
                    batch = None
                yield
        finally:
            self._release(active)

    def _prefill(self, sequence: Sequence) -> None:
        """Gives a sequence its pages and caches its prompt but the last token, which is the first cycle's root."""
        begin = time.perf_counter()
        target, total = self.model.target, sequence.prompt_length + sequence.limit
        target.ensure_positions(total)
        with self._turns:
            sequence.pages = self.cache.allocate(total + self.drafter.max_nodes)
        prompt = sequence.tokens[:-1]
        for start in range(0, len(prompt), PREFILL_ROWS):
            rows = TreeBatch.chains([prompt[start : start + PREFILL_ROWS]], target.device)
            with self._turns:
                target.hidden(rows, self.cache, self.cache.batch([sequence.pages], [start]))
        sequence.started = time.perf_counter()
        sequence.prefill_seconds = sequence.started - begin

    def _cycle(self, batch: Batch) -> None:
        """One round: every sequence of the batch commits its accepted tokens and the bonus token."""
        target, times = self.model.target, [time.perf_counter()]
        trees = self.drafter.draft(batch.sequences)
        tree = TreeBatch.of(trees, target.device)
        times.append(time.perf_counter())
        out = target.forward(tree, self.cache, batch.cache, greedy=not batch.reads_logits)
        times.append(time.perf_counter())
        accepted = target.ops.verify_tree(
            out.scores, tree, batch.params, batch.history, batch.workspace, rule=self.rule.name
        )
        committed = batch.commit(trees, accepted, out.scores, tree.row_start.tolist())
        times.append(time.perf_counter())
        self.cache.compact(batch.cache, accepted, target.ops)
        times.append(time.perf_counter())
        self.drafter.observe(batch.sequences, committed, out.features)
        for sequence in batch.sequences:
            sequence.count_time(times)

    def _release(self, sequences: Iterable[Sequence]) -> None:
        # Takes no turn: the garbage collector may close an abandoned stream in the middle of a cycle of this thread.
        for sequence in sequences:
            self.cache.free(sequence.pages)
            sequence.pages = []


def _one_each(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Seq) and len(params) == count and all(isinstance(p, SamplingParams) for p in params):
        return list(params)
    raise ValueError(f"params: expected one SamplingParams or {count} of them, one per prompt, got {params!r}")
