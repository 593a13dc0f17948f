"""What the target makes of dialogues, by the engine's own passes: the states that drafters learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.models.transformer import Transformer


@dataclass(frozen=True)
class States:
    """Of one dialogue of T tokens.  greedy: int32 [T].  last: [T, C].  at_layers: [T, hidden_state_layers, C].  keys, values:
    [layers, K, T, D]; see TrainingBatch."""

    greedy: torch.Tensor
    last: torch.Tensor
    at_layers: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class TargetStates:
    """Passes of one target. hidden_state_layers: layers whose input is kept.  kv_layers: layers whose keys and values are.

    rows: of a pass, so many tokens of some dialogues at a time.
    """

    def __init__(
        self, target: Transformer, hidden_state_layers: Sequence[int], kv_layers: Sequence[int] = (), rows: int = 512
    ) -> None:
        self.target = target.with_hidden_state_layers(hidden_state_layers)
        self.kv_layers, self.rows = tuple(kv_layers), rows
        self._cache = target.new_cache()

    @torch.inference_mode()
    def of(self, tokens: Sequence[int]) -> States:
        """The states of one dialogue, on the target's device."""
        self.target.ensure_positions(len(tokens))
        pages = self._cache.allocate(len(tokens))
        try:
            return self._of(tokens, pages)
        finally:
            self._cache.free(pages)

    def _of(self, tokens: Sequence[int], pages: list[int]) -> States:
        greedy, last, at_layers = [], [], []
        for start in range(0, len(tokens), self.rows):
            run = TreeBatch.chains([tokens[start : start + self.rows]], self.target.device)
            out = self.target.forward(run, self._cache, self._cache.batch([pages], [start]), greedy=True)
            # an op may give out the same memory in every pass
            greedy.append(out.scores.clone())
            last.append(out.hidden_states.last.clone())
            if out.hidden_states.at_layers is not None:
                at_layers.append(out.hidden_states.at_layers.clone())
        of_taps = torch.cat(at_layers) if at_layers else None
        return States(torch.cat(greedy), torch.cat(last), of_taps, *self._keys_values(pages, len(tokens)))

    def _keys_values(self, pages: list[int], count: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.kv_layers:
            return None, None
        place = torch.tensor(pages, device=self.target.device)
        layers = torch.tensor(self.kv_layers, device=self.target.device)
        # [layers, pages, K, slots, D] -> [layers, K, T, D]
        keys, values = (
            pool[layers][:, place].transpose(1, 2).flatten(2, 3)[:, :, :count].contiguous()
            for pool in (self._cache.k, self._cache.v)
        )
        return keys, values
