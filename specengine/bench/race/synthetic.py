"""A drafter whose acceptance is chosen: cycles of any shape on a target of random weights.

It drafts numbers, and the target's logits are bent after the pass so that a drafted token is accepted with the chosen
probability. That changes the text; passes, verification and compaction are the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine._C import MAX_NODES
from specengine.bench.race.draft_cost import COSTS, Eagle3, FastEagle
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.drafters.base import Drafter
from specengine.drafters.capabilities import DeviceDrafter
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.root_tokens import root_tokens
from specengine.engine.batch import Batch
from specengine.engine.device.buffers import GraphBatch
from specengine.engine.engine import Engine
from specengine.models.transformer import TargetOutput, Transformer
from specengine.ops.layer import rows_of
from specengine.tensor_parallel.loading import LoadedModel
from specengine.utils.spec_string import Spec, check_range

NAME = "synthetic"
PERIOD = 4096  # positions after which the drafts repeat themselves
_FAR = 1e4  # from any other logit


@dataclass(frozen=True)
class Config:
    """k: nodes per level; only the first one has children and is ever accepted: k = 1 is a chain.
    cost: what drafting costs: nothing, or what a drafter of this name would compute."""

    k: int = 1
    cost: str = "none"

    def __post_init__(self) -> None:
        check_range("k", self.k, 1, MAX_NODES - 1)
        if self.cost not in ("none", *COSTS):
            raise ValueError(f"cost: expected none, {' or '.join(COSTS)}, got {self.cost!r}")


def is_synthetic(drafter: str) -> bool:
    """Whether a drafter's description is one of this module's: `synthetic:0.81,0.80,k=10,cost=eagle3`."""
    return drafter.partition(":")[0].strip() == NAME


class Synthetic(Drafter, DeviceDrafter):
    """rates: per depth, the probability that the drafted token is accepted once its parent is."""

    name = NAME
    config_type = Config
    config: Config
    takes_path = True
    adaptive = False

    def __init__(self, config: Config, rates: Sequence[float], target: Transformer) -> None:
        super().__init__(config, None, target)
        self.rates = tuple(rates)
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError(f"drafter: {NAME} takes the acceptance of each depth, from 0 to 1, got {self.rates}")
        check_range("nodes", self.max_nodes, 2, MAX_NODES)
        if config.k >= target.config.vocab_size:
            raise ValueError(f"k: expected less than the vocabulary of {target.config.vocab_size}, got {config.k}")
        self._device = target.device
        k, levels = config.k, len(self.rates)
        parents = [-1, *(0 if level == 0 else 1 + (level - 1) * k for level in range(levels) for _ in range(k))]
        self._parents = parents
        self._shape = TreeBatch.of([DraftTree([0] * len(parents), parents)], self._device, masked=True)
        self._tokens, self._bends = (table.to(self._device) for table in self._tables(target.config.vocab_size))
        self._cost: Eagle3 | FastEagle | None = COSTS[config.cost](target, levels, k) if config.cost != "none" else None

    @staticmethod
    def parse(text: str, target: Transformer) -> Synthetic:
        """From `synthetic:RATE,RATE,...[,k=..][,cost=..]`. Raises ValueError for anything else."""
        items = text.partition(":")[2].split(",")
        options = [item for item in items if "=" in item]
        try:
            rates = [float(item) for item in items if "=" not in item]
        except ValueError:
            raise ValueError(f"drafter: expected {NAME}:RATE,RATE,... and options, got {text!r}") from None
        spec = Spec.parse(",".join([NAME, *options]), "drafter")
        return Synthetic(spec.build(Config, "drafter"), rates, target)

    def _tables(self, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[PERIOD, N] by the root's position: the drafted tokens, int32, and what their logits become, float32.

        Whether a token is accepted depends on its position and depth. Token 0 is never drafted.
        """
        k, levels = self.config.k, len(self.rates)
        depth = torch.arange(1, levels + 1)
        position = torch.arange(PERIOD)[:, None] + depth  # of the node
        first = _hash(position * 64 + depth) % (vocab - 1)
        sibling = torch.arange(k)
        tokens = 1 + (first[:, :, None] + sibling) % (vocab - 1)
        least = torch.tensor([round(rate * (1 << 24)) for rate in self.rates])
        accepted = _hash(position * 64 + depth + (1 << 30)) % (1 << 24) < least
        bends = torch.where(accepted[:, :, None] & (sibling == 0), _FAR, -_FAR)
        roots = torch.zeros(PERIOD, 1)
        return torch.cat([roots, tokens.flatten(1)], 1).int(), torch.cat([roots, bends.flatten(1)], 1)

    @property
    def max_nodes(self) -> int:
        return 1 + self.config.k * len(self.rates)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        if self._cost and requests:
            columns = ([s.tokens[-1] for s in requests], [len(s.tokens) - 1 for s in requests])
            roots, lengths = (torch.tensor(x, dtype=torch.int32, device=self._device) for x in columns)
            self._cost(roots, lengths)
        trees = []
        for request in requests:
            nodes = min(self.max_nodes, 1 + self.config.k * request.draft_limit)
            tokens = self._tokens[(len(request.tokens) - 1) % PERIOD, 1:nodes].tolist()
            trees.append(DraftTree([request.tokens[-1], *tokens], self._parents[:nodes]))
        return trees

    def draft_on_device(self, slots: DraftBatch) -> TreeBatch:
        nodes, shape, history = slots.nodes, self._shape, slots.history
        last = (history.length - 1).long()
        root = root_tokens(history)
        if self._cost:
            self._cost(root.view(-1), slots.cache.lengths, slots.mark)
        tokens = torch.cat([root, self._tokens[last % PERIOD, 1:nodes]], 1)
        limit = slots.limits.final_length - history.length - 1
        unused = (shape.depths[:nodes] > limit[:, None]) | (slots.limits.active == 0)[:, None]
        words = -(-nodes // 32)
        assert shape.ancestors is not None  # masked
        bits = shape.ancestors[:nodes, :words].masked_fill(unused[:, :, None], 0).view(-1, words)
        columns = (tokens, shape.parents[:nodes], shape.depths[:nodes])
        tokens, parents, depths = (column.masked_fill(unused, -1).view(-1) for column in columns)
        return TreeBatch(tokens, parents, depths, slots.row_start, bits, nodes)

    def bend(self, logits: torch.Tensor, tree: TreeBatch, lengths: torch.Tensor) -> None:
        """Makes the first node of each level the target's choice, or its whole level not, as was decided for it.

        logits: float32 [M, V], written.  lengths: int32 [B], of the prefix: the root's position.
        """
        row = torch.arange(len(logits), device=logits.device)
        request, node = rows_of(tree.row_start, len(logits))
        drafted = tree.parents >= 0
        # The other rows write column 0 back: what is bent must have one shape in a captured graph.
        rows = torch.where(drafted, tree.row_start[request] + tree.parents, row)
        columns = tree.tokens.masked_fill(~drafted, 0).long()
        bends = self._bends[lengths[request].long() % PERIOD, node]
        logits.index_put_((rows, columns), torch.where(drafted, bends, logits[:, 0]))


class SyntheticEngine(Engine):
    """An engine whose target agrees with a Synthetic drafter as often as that wants; what it says means nothing."""

    drafter: Synthetic

    def __init__(self, model: LoadedModel, drafter: str, **options) -> None:
        super().__init__(model, drafter=Synthetic.parse(drafter, model.target), **options)

    def _forward(self, tree: TreeBatch, batch: Batch | GraphBatch) -> TargetOutput:
        out = self.model.target.forward(tree, self.cache, batch.cache)
        batch.mark("verify")
        self.drafter.bend(out.scores, tree, batch.cache.lengths)
        batch.mark("bend")
        return out


def _hash(x: torch.Tensor) -> torch.Tensor:
    """int64 -> well-mixed 32 bits; no product overflows, so every device gives the same."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x
