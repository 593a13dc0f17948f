"""GLIDE with CAPE (Du et al. 2024): a small model whose layers also attend to the target's own cached keys and values.

Drafter layer m reads those of target layer N_T - N_D + m. It drafts greedily, token by token; the less sure it is of a
token, the more siblings that token gets (CAPE).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specengine._C import MAX_NODES
from specengine.cost_model import CostModel, costs_of
from specengine.drafters.base import Drafter
from specengine.features import Features
from specengine.glide_network import GlideNetwork, Place
from specengine.kv_cache import KVCache
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.models.transformer import Transformer
from specengine.ops.expand_backbone import expand_backbone
from specengine.ops.row_tools import confidence, likeliest, stack_rows
from specengine.options import check_range
from specengine.scored_trees import Drafted, ScoredTree, TreeCutter
from specengine.shipped import find_drafter
from specengine.tree import DraftTree, TreeBatch
from specengine.tree_choice import deeper_pays

# CAPE: siblings beside the greedy token, by its probability: 7 up to 0.3, 5 up to 0.6, 3 up to 0.8, else 1.
THRESHOLDS = (0.3, 0.6, 0.8)
WIDTHS = (8, 6, 4, 2)


@dataclass(frozen=True)
class Config:
    """length: tokens drafted one after another.  cape: give them siblings; without, the draft is a chain.
    cross: attend to the target's cache; without (an ablation) the drafter is an ordinary small model.
    adaptive: stop drafting where the next pass would not pay, and keep the nodes that do (any choice is lossless under
    the rule `match`).  dtype: of the drafter's weights, as the engine's.
    """

    length: int = 4
    cape: bool = True
    cross: bool = True
    adaptive: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_range("length", self.length, 1, (MAX_NODES - 1) // (WIDTHS[0] if self.cape else 1))

    @property
    def widths(self) -> tuple[int, ...]:
        return WIDTHS if self.cape else (1,)


@dataclass
class State:
    """Of one sequence. cached: its first tokens whose rows are in the drafter's cache as they stay."""

    cached: int = 0
    drafted: Drafted | None = None


class Glide(Drafter):
    """Drafts a chain or a backbone with leaves, with one small pass per level."""

    name = "glide"
    Config = Config
    takes_path = True

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CostModel | None = None) -> None:
        super().__init__(config, path, target)
        checkpoint = open_draft_checkpoint(find_drafter(self.name, path, target))
        self.network = GlideNetwork(checkpoint, target, config.dtype, cross=config.cross)
        check_range("drafter: cape", max(config.widths), 1, self.network.head.rows)
        self._costs = (costs or costs_of(target)) if config.adaptive and not target.ops.resident else None
        self._cutter = TreeCutter(self._costs)
        self._device, self._prefill_rows = target.device, target.ops.prefill_rows

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        return not self.config.cape

    @property
    def max_nodes(self) -> int:
        return 1 + self.config.length * self.config.widths[0]

    @property
    def page_bytes(self) -> int:
        return self.network.page_bytes

    def attach(self, cache: KVCache) -> None:
        self.network.attach(cache)

    def observe(self, sequences: Sequence, committed: Sequence[list[int]], features: Features | None) -> None:
        for sequence, tokens in zip(sequences, committed, strict=True):
            if sequence.drafter_state and sequence.drafter_state.drafted:
                self._cutter.observe(sequence.drafter_state.drafted, tokens)

    @torch.inference_mode()
    def draft(self, sequences: Sequence) -> list[DraftTree]:
        trees = [ScoredTree(sequence.tokens[-1:], [-1], [1.0]) for sequence in sequences]
        # a prompt of one token is in no cache yet
        able = [i for i, sequence in enumerate(sequences) if len(sequence.tokens) > 1 and sequence.draft_limit > 0]
        prefix = sum(len(sequence.tokens) for sequence in sequences) / len(sequences)
        if able:
            drafting = [sequences[i] for i in able]
            for i, tree in zip(able, self._expand(self._backbone(drafting, prefix)), strict=True):
                trees[i] = tree.rooted(sequences[i].tokens[-1], sequences[i].draft_limit)
        drafted = self._cutter.cut(trees, prefix)
        for i in able:
            sequences[i].drafter_state.drafted = drafted[i]
        return [each.tree for each in drafted]

    def _backbone(self, sequences: Sequence, prefix: float) -> list[torch.Tensor]:
        """Logits [B, Vd] of every level; the likeliest token of each is what the next one continues."""
        begin, deepest = time.perf_counter(), min(self.config.length, max(s.draft_limit for s in sequences))
        reach, expected = [1.0] * len(sequences), [1.0] * len(sequences)
        logits = [self._logits(sequences)]
        while (levels := len(logits)) < deepest:
            if self._costs is not None:
                sure = confidence(logits[-1])
                reach = [before * self._cutter.learned(chance) for before, chance in zip(reach, sure, strict=True)]
                expected = [tokens + chance for tokens, chance in zip(expected, reach, strict=True)]
                spent = time.perf_counter() - begin
                seconds = self._costs(len(sequences) * (1 + levels), prefix) + spent
                if not deeper_pays(reach, expected, levels, seconds, spent / levels):
                    break
            tokens = [token for (token,) in likeliest(logits[-1], 1)]
            logits.append(self._logits(sequences, self.network.target_ids(tokens), levels))
        return logits

    def _expand(self, logits: list[torch.Tensor]) -> list[ScoredTree]:
        """Trees whose root is still to be set."""
        levels, batch = len(logits), len(logits[0])
        rows = stack_rows(logits).view(levels, batch, -1).transpose(0, 1).contiguous()
        roots = torch.zeros(batch, dtype=torch.int32, device=rows.device)
        best = expand_backbone(rows, roots, self.config.widths, THRESHOLDS if self.config.cape else ())
        tokens, parents, scores = (each.cpu().numpy() for each in (best.tokens, best.parents, best.scores))
        chances = np.exp(scores - np.take_along_axis(scores, parents.clip(0), 1)).tolist()
        columns = zip(tokens.tolist(), parents.tolist(), chances, best.node_counts.tolist(), strict=True)
        return [ScoredTree([0, *self.network.target_ids(t[1:n])], p[:n], c[:n]) for t, p, c, n in columns]

    def _logits(self, sequences: Sequence, drafted: Sequence[int] = (), level: int = 0) -> torch.Tensor:
        """One pass over what was committed since the last draft, or over the tokens just drafted; [B, Vd]."""
        if level:
            starts = [len(sequence.tokens) - 1 + level for sequence in sequences]
            return self._pass(sequences, [[token] for token in drafted], starts)
        states = [self._caught_up(sequence, len(sequences)) for sequence in sequences]
        starts = [state.cached for state in states]
        logits = self._pass(sequences, [s.tokens[start:] for s, start in zip(sequences, starts, strict=True)], starts)
        for sequence, state in zip(sequences, states, strict=True):
            state.cached = len(sequence.tokens) - 1  # the root is passed again once the target has its keys
        return logits

    def _caught_up(self, sequence, batch: int) -> State:
        """Passes what is more than one pass of the batch should hold: prompts."""
        if sequence.drafter_state is None:
            sequence.drafter_state = State()
            self.network.ensure_positions(sequence.prompt_length + sequence.limit + self.config.length)
        state, step = sequence.drafter_state, self._prefill_rows
        most = max(self.config.length + 2, step // batch)  # what a cycle commits always fits
        while (waiting := len(sequence.tokens) - state.cached) > most:
            run = sequence.tokens[state.cached : state.cached + min(step, waiting - most)]
            self._pass([sequence], [run], [state.cached], wanted=False)
            state.cached += len(run)
        return state

    def _pass(self, sequences: Sequence, runs: list[list[int]], starts: list[int], wanted: bool = True):
        verified = [len(sequence.tokens) - 1 for sequence in sequences]  # what the target has keys of
        place = Place([sequence.pages for sequence in sequences], starts, verified)
        states = self.network.states(TreeBatch.chains(runs, self._device), place)
        ends = np.cumsum([len(run) for run in runs]) - 1
        return self.network.logits(states[torch.from_numpy(ends).to(states.device)]) if wanted else None
