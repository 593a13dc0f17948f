"""Builds batches for verify_tree: trees whose tokens the target is likely to draw."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.types import SamplingParams
from tests.ops.cases import Parents, randn

CPU = torch.device("cpu")

PARAMS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_k over V": SamplingParams(temperature=1.0, top_k=10**9),
    "top_p": SamplingParams(temperature=1.2, top_p=0.7),
    "tiny top_p": SamplingParams(temperature=1.0, top_p=1e-6),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "reward": SamplingParams(temperature=0.8, repetition_penalty=0.7, presence_penalty=-0.5),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=0.8),
    "greedy penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 3.0, 2: -1e6, 4: 1.5}),
    "greedy bias": SamplingParams(logit_bias={1: 2.0, 3: -3.0}),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=6,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={3: 1.0, 1: -2.0},
    ),
}


@dataclass
class Batch:
    """The arguments of verify_tree."""

    logits: torch.Tensor
    tree: TreeBatch
    params: SamplingTable
    history: TokenHistory

    def arguments(self) -> tuple[torch.Tensor, TreeBatch, SamplingTable, TokenHistory]:
        return self.logits, self.tree, self.params, self.history

    def to(self, device: torch.device) -> Batch:
        return Batch(self.logits.to(device), *(to_device(part, device) for part in self.arguments()[1:]))


def to_device(part, device: torch.device):
    """A dataclass of tensors with every tensor on the device."""
    tensors = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
    return replace(part, **{name: tensor.to(device) for name, tensor in tensors.items()})


def history_of(rows: Sequence[Sequence[int]], prompts: Sequence[int]) -> TokenHistory:
    """Histories of different lengths, padded with a token id that would be refused if it were read."""
    columns = max((len(row) for row in rows), default=0)
    table = [[*row, *[-7] * (columns - len(row))] for row in rows]
    return TokenHistory(
        torch.tensor(table, dtype=torch.int32).reshape(len(rows), columns),
        torch.tensor([len(row) for row in rows], dtype=torch.int32),
        torch.tensor(list(prompts), dtype=torch.int32),
    )


def make_batch(trees: Sequence[Parents], params: Sequence[SamplingParams], vocab: int, *, seed: int = 0) -> Batch:
    """Trees of likely tokens (siblings repeat some), histories of those tokens, logits that prefer them."""
    rng = random.Random(seed)
    likely = rng.sample(range(vocab), min(5, vocab))
    drafts = [DraftTree([rng.choice(likely) for _ in tree], tree) for tree in trees]
    tree = TreeBatch.of(drafts, CPU)
    logits = randn(len(tree.tokens), vocab, seed=seed + 1)
    logits[:, likely] += 4
    histories = [[*rng.choices(likely, k=rng.randint(0, 12)), draft.tokens[0]] for draft in drafts]
    history = history_of(histories, [rng.randint(0, len(row)) for row in histories])
    return Batch(logits, tree, SamplingTable.of(params, [rng.randrange(2**63) for _ in trees]), history)


def crowded(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Logits whose largest are equal, or neighbours among the float32 numbers, or round to the same quotient."""
    logits = randn(rows, vocab, seed=seed) * (10.0 ** randn(rows, 1, seed=seed + 1).clamp(-2, 2))
    logits[::4] = logits[::4].round()
    top, steps = logits.amax(dim=1), torch.randint(0, 3, (rows, 4), generator=torch.Generator().manual_seed(seed))
    places = randn(rows, vocab, seed=seed + 2).argsort(dim=1)[:, : min(4, vocab)]
    for column in range(places.shape[1]):
        for _ in range(2):
            moved = torch.nextafter(top, torch.full_like(top, torch.inf if column % 2 else -torch.inf))
            top = torch.where(steps[:, column] > 0, moved, top)
        logits[torch.arange(rows), places[:, column]] = top
    return logits


def random_masks(tree: TreeBatch, vocab: int, seed: int, legal: float = 0.8) -> torch.Tensor:
    """Whether each node allows a token, bool [M, V]: one to all tokens, a drafted child with the chance `legal`."""
    rng = torch.Generator().manual_seed(seed)
    rows = len(tree.tokens)
    share = torch.tensor([0.0, 0.1, 0.5, 1.0])[torch.randint(4, (rows, 1), generator=rng)]
    allowed = torch.rand(rows, vocab, generator=rng) < share
    allowed[range(rows), torch.randint(vocab, (rows,), generator=rng)] = True
    starts = tree.row_start[:-1].repeat_interleave(tree.row_start.diff())
    drafted = (tree.parents >= 0) & (torch.rand(rows, generator=rng) < legal)
    allowed[(starts + tree.parents)[drafted], tree.tokens[drafted]] = True
    return allowed


def random_params(rng: random.Random, vocab: int, likely: list[int]) -> SamplingParams:
    def some(chance: float, value, off):
        return value if rng.random() < chance else off

    tokens = rng.sample(range(vocab), rng.randint(0, min(vocab, 6))) + likely
    return SamplingParams(
        temperature=some(0.8, rng.choice([1.0, rng.uniform(0.05, 3.0)]), 0.0),
        top_k=some(0.15, rng.randint(1, vocab + 2), 0),
        top_p=some(0.15, rng.choice([1e-6, rng.uniform(0.01, 0.999)]), 1.0),
        min_p=some(0.1, rng.uniform(0.0, 1.0), 0.0),
        repetition_penalty=some(0.2, rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=some(0.2, rng.uniform(-2.0, 2.0), 0.0),
        frequency_penalty=some(0.2, rng.uniform(-1.0, 1.0), 0.0),
        logit_bias=some(0.2, {token: rng.choice([-1e6, rng.uniform(-5.0, 5.0)]) for token in tokens[1:]}, None),
    )


def table_for(params: SamplingParams, trials: int) -> SamplingTable:
    """One entry per trial, seeds 0, 1, ...; without biases."""
    one = SamplingTable.of([params], [0])
    columns = {
        name: value.expand(trials).contiguous() for name, value in vars(one).items() if not name.startswith("bias")
    }
    columns["seed"] = torch.arange(trials)
    return SamplingTable(
        bias_start=torch.zeros(trials + 1, dtype=torch.int32),
        bias_tokens=one.bias_tokens,
        bias_values=one.bias_values,
        **columns,
    )
