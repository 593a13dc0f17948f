"""The logits of an EAGLE draft, level by level, behind nodes that were chosen elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.cache.page_pool import PagePool
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.eagle.expanded_rows import Expanded
from specengine.drafters.eagle.network import EagleNetwork, Outputs
from specengine.ops.row_tools import take_rows


class EagleLevels:
    """Continues the outputs of each request's last pair.

    trees: roots, in the order of the outputs.  outputs: of the last pairs.  expanded: where the nodes' rows lie.
    """

    def __init__(
        self, network: EagleNetwork, pool: PagePool, trees: Sequence[Growth], outputs: Outputs, expanded: Expanded
    ) -> None:
        self._network, self._pool, self._expanded = network, pool, expanded
        self._trees = list(trees)
        self._outputs = outputs
        self._fed = outputs.fed[:, None]  # [B, w, hidden]
        self._above = [[0] for _ in trees]  # the nodes of those rows

    def __call__(self, growing: Sequence[Growth], level: int) -> torch.Tensor:
        """Returns the logits [R, Vd] of all open nodes."""
        if level == 0:
            return self._network.logits(self._outputs.read)
        opened = [tree.open if any(tree is other for other in growing) else [] for tree in self._trees]
        width = max(map(len, opened))
        tokens, places = [], []
        for tree, nodes, before in zip(self._trees, opened, self._above, strict=True):
            missing = width - len(nodes)  # such rows are read by no other
            tokens.append([tree.tokens[node] for node in nodes] + missing * tree.tokens[:1])
            places.append([before.index(tree.parents[node]) for node in nodes] + missing * [0])
        device, batch = self._fed.device, len(opened)
        above = torch.tensor(places, device=device)
        first_node = self._expanded.count  # before the level is added
        rows = self._expanded.add(torch.tensor(tokens, dtype=torch.int32, device=device), above)
        hidden_states = self._fed.gather(1, above[..., None].expand(-1, -1, self._fed.shape[2])).flatten(0, 1)
        place = self._expanded.place
        outputs = self._network.forward(rows, hidden_states, place, self._pool, first_node=first_node)
        self._fed, self._above = outputs.fed.view(batch, width, -1), [list(nodes) for nodes in opened]
        picked = [b * width + i for b, nodes in enumerate(opened) for i in range(len(nodes))]
        return self._network.logits(take_rows(outputs.read, picked))
