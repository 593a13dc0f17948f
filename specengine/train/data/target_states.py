"""The target's outputs on dialogues, computed by the engine's own passes: drafters learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import KVCache
from specengine.draft_trees.tree import TreeBatch
from specengine.models.transformer import Transformer


@dataclass(frozen=True)
class TargetStates:
    """The target's outputs on one dialogue of T tokens; see TrainingBatch.

    greedy: int32 [T].  last: [T, C].  at_layers: [T, layers, C].  keys, values: [layers, K, T, D].
    """

    greedy: torch.Tensor
    last: torch.Tensor
    at_layers: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class TargetPasses:
    """Runs a target over dialogues.

    hidden_state_layers: layers whose input is returned.  kv_layers: layers whose keys and values are returned.
    rows: tokens of a pass; longer dialogues take several passes.
    """

    def __init__(
        self, target: Transformer, hidden_state_layers: Sequence[int], kv_layers: Sequence[int] = (), rows: int = 512
    ) -> None:
        self.target = target.with_hidden_state_layers(hidden_state_layers)
        self.kv_layers = tuple(kv_layers)
        self.rows = rows

    @torch.inference_mode()
    def of(self, tokens: Sequence[int]) -> TargetStates:
        """Computes the states of one dialogue, on the target's device."""
        self.target.ensure_positions(len(tokens))
        cache = self.target.new_cache(-(-len(tokens) // PAGE_SIZE), 1)
        pages = cache.allocate(len(tokens))
        greedy: list[torch.Tensor] = []
        last: list[torch.Tensor] = []
        at_layers: list[torch.Tensor] = []
        for start in range(0, len(tokens), self.rows):
            run = TreeBatch.chains([tokens[start : start + self.rows]], self.target.device)
            out = self.target.forward(run, cache, cache.batch([pages], [start]), greedy=True)
            # an op may return the same memory in every pass
            greedy.append(out.scores.clone())
            last.append(out.hidden_states.last.clone())
            if out.hidden_states.at_layers is not None:
                at_layers.append(out.hidden_states.at_layers.clone())
        keys, values = self._keys_values(cache, pages, len(tokens))
        return TargetStates(
            torch.cat(greedy), torch.cat(last), torch.cat(at_layers) if at_layers else None, keys, values
        )

    def _keys_values(
        self, cache: KVCache, pages: list[int], count: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.kv_layers:
            return None, None
        place = torch.tensor(pages, device=self.target.device)
        layers = torch.tensor(self.kv_layers, device=self.target.device)
        # [layers, pages, K, slots, D] -> [layers, K, T, D]
        keys, values = (
            pool[layers[:, None], place].transpose(1, 2).flatten(2, 3)[:, :, :count].contiguous()
            for pool in (cache.k, cache.v)
        )
        return keys, values
