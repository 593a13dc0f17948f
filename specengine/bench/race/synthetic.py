"""A drafter with a chosen acceptance, for cycles of any shape on a target of random weights.

It drafts arbitrary tokens. After the target's pass the engine changes ("bends") the logits, so that a drafted token is
accepted with the chosen probability. The text changes; passes, verification and compaction are those of any drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine._C import MAX_NODES
from specengine.bench.race.draft_cost import COSTS, Eagle3, FastEagle
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.engine.cycle import Cycle
from specengine.engine.cycle_batch import CycleBatch
from specengine.engine.engine import Engine
from specengine.models.transformer import TargetOutput, Transformer
from specengine.ops.layer import rows_of
from specengine.tensor_parallel.loading import LoadedModel
from specengine.utils.spec_string import Spec, check_range

NAME = "synthetic"
PERIOD = 4096  # positions after which the drafts repeat
_FAR = 1e4  # above or below every other logit


@dataclass(frozen=True)
class Config:
    """k: nodes per level, 1 for a chain; only the first node of a level has children and can be accepted.
    cost: the drafter whose computation is run; `none` for no computation."""

    k: int = 1
    cost: str = "none"

    def __post_init__(self) -> None:
        check_range("k", self.k, 1, MAX_NODES - 1)
        if self.cost not in ("none", *COSTS):
            raise ValueError(f"cost: expected none, {' or '.join(COSTS)}, got {self.cost!r}")


def is_synthetic(drafter: str) -> bool:
    """Returns whether a description names this drafter, as `synthetic:0.81,0.80,k=10,cost=eagle3`."""
    return drafter.partition(":")[0].strip() == NAME


class Synthetic(Drafter):
    """Drafts trees whose acceptance is chosen.

    rates: per depth, the probability that a node is accepted once its parent is.
    """

    name = NAME
    config_type = Config
    drafts_in_cycle = True
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
        """Makes a drafter from `synthetic:RATE,RATE,...[,k=..][,cost=..]`. Raises ValueError for other texts."""
        items = text.partition(":")[2].split(",")
        options = [item for item in items if "=" in item]
        try:
            rates = [float(item) for item in items if "=" not in item]
        except ValueError:
            raise ValueError(f"drafter: expected {NAME}:RATE,RATE,... and options, got {text!r}") from None
        spec = Spec.parse(",".join([NAME, *options]), "drafter")
        return Synthetic(spec.build(Config, "drafter"), rates, target)

    def _tables(self, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tables [PERIOD, N] by the root's position: the drafted tokens, int32, and their bent logits, float32.

        Position and depth decide whether a token is accepted. Token 0 is never drafted.
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

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        if self._cost and requests:
            roots = torch.tensor([r.tokens[-1] for r in requests], dtype=torch.int32, device=self._device)
            lengths = torch.tensor([len(r.tokens) - 1 for r in requests], dtype=torch.int32, device=self._device)
            self._cost(roots, lengths)
        trees = []
        for request in requests:
            nodes = min(self.max_nodes, 1 + self.config.k * request.draft_limit)
            tokens = self._tokens[(len(request.tokens) - 1) % PERIOD, 1:nodes].tolist()
            trees.append(DraftTree([request.tokens[-1], *tokens], self._parents[:nodes]))
        return Draft(requests, trees)

    def draft_on_device(self, slots: DraftBatch) -> TreeBatch:
        nodes = slots.nodes
        shape = self._shape
        history = slots.history
        last = (history.length - 1).long()
        root = history.last
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
        """Makes the first node of each accepted level the target's choice, and no node of a rejected level.

        logits: float32 [M, V], written.  lengths: int32 [B], of the prefixes, which are the roots' positions.
        """
        row = torch.arange(len(logits), device=logits.device)
        request, node = rows_of(tree.row_start, len(logits))
        drafted = tree.parents >= 0
        # Roots write column 0 back unchanged: a captured graph needs one shape for every tree.
        rows = torch.where(drafted, tree.row_start[request] + tree.parents, row)
        columns = tree.tokens.masked_fill(~drafted, 0).long()
        bends = self._bends[lengths[request].long() % PERIOD, node]
        logits.index_put_((rows, columns), torch.where(drafted, bends, logits[:, 0]))


class SyntheticCycle(Cycle):
    """Bends the target's logits after the pass, so that a drafted token is accepted with the chosen probability."""

    drafter: Synthetic

    def verify(self, tree: TreeBatch, batch: CycleBatch) -> TargetOutput:
        output = self.target.forward(tree, self.cache, batch.cache)
        batch.mark("verify")
        batch.fill_masks(tree)
        self.drafter.bend(output.scores, tree, batch.cache.lengths)
        batch.mark("bend")
        return output


class SyntheticEngine(Engine):
    """An engine with a Synthetic drafter. Its text means nothing; its times do."""

    cycle_type = SyntheticCycle

    def __init__(self, model: LoadedModel, drafter: str, **options) -> None:
        super().__init__(model, drafter=Synthetic.parse(drafter, model.target), **options)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """Returns 32 mixed bits of an int64. No product overflows, so every device returns the same."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x
