"""Verification: walks the drafted trees with the target's logits.

Shapes: M rows (nodes of all requests), B requests, V vocabulary, N columns of a path, R rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.ops.sampling_table import SamplingTable, TokenHistory, sampled_trees
from specengine.ops.target_distribution import draw_reference
from specengine.rules.base import Rule
from specengine.rules.lossless import Match

NO_DRAFT_LOGITS = _C.DraftLogits(None, None, None, False)


@dataclass(frozen=True)
class Accepted:
    """The tokens that a cycle committed.

    path: int32 [B, N], node indices, root first, then -1.  path_length: int32 [B], root included, so it is also the
    number of tokens committed.  bonus: int32 [B].  relaxed: int32 [B], accepted tokens that the exact rule would have
    refused.
    """

    path: torch.Tensor
    path_length: torch.Tensor
    bonus: torch.Tensor
    relaxed: torch.Tensor

    def paths(self) -> _C.AcceptedPaths:
        """The tensors as the ops take them."""
        return _C.AcceptedPaths(self.path, self.path_length, self.bonus, self.relaxed)


@dataclass(frozen=True)
class VerifyWorkspace:
    """Scratch of verify_tree for a batch size.

    scores: float32 [B, V] and counts: int32 [B, V], on CUDA zero between calls.  row_states: int64 [R,
    ROW_STATE_WORDS], only CUDA needs them.  weights: int64 [B, 4, V], only rules other than `match` need them.
    """

    scores: torch.Tensor
    counts: torch.Tensor
    row_states: torch.Tensor
    weights: torch.Tensor | None

    @staticmethod
    def empty(
        batch: int, vocab: int, *, device: torch.device | str = "cpu", rows: int = 0, weights: bool = False
    ) -> VerifyWorkspace:
        """Scratch for `batch` requests and up to `rows` rows of logits; weights: whether a rule may need them."""
        shape = (batch, _C.WEIGHT_PLANES, vocab)
        return VerifyWorkspace(
            scores=torch.zeros(batch, vocab, device=device),
            counts=torch.zeros(batch, vocab, dtype=torch.int32, device=device),
            row_states=torch.empty(rows, _C.ROW_STATE_WORDS, dtype=torch.int64, device=device),
            weights=torch.empty(shape, dtype=torch.int64, device=device) if weights else None,
        )

    def part(self, batch: int, rows: int) -> VerifyWorkspace:
        """A smaller workspace in the same memory."""
        weights = None if self.weights is None else self.weights[:batch]
        return VerifyWorkspace(self.scores[:batch], self.counts[:batch], self.row_states[:rows], weights)


def verify_tree(
    scores: torch.Tensor,
    tree: TreeBatch,
    params: SamplingTable,
    history: TokenHistory,
    workspace: VerifyWorkspace | None = None,
    rule: Rule | None = None,
    draft: DraftLogits | None = None,
) -> Accepted:
    """Walks every tree by a rule. `match`, the default, draws the target's token at each node and follows it while the
    tree has it.

    scores: logits float32 [M, V], or the target's token at every node, int32 [M]. Tokens serve greedy decoding under
    `match`; -1 marks a row without a token, and a workspace must be given.  draft: the distributions from which the
    drafter drew children.
    Under `match` a draw depends on its node's distribution and its noise alone, so the tokens committed are those of
    plain decoding. The noise has two levels: the first is keyed (seed, position, block of 64 tokens), the second (seed,
    position, token). Acceptance coins are keyed (seed, root position, node), on a stream of their own.
    Raises ValueError for NaN or infinite scores on the walk (-inf is a masked token), for such scores of the drafter if
    the rule reads them, and for a parent that is no earlier node. On CUDA the host does not wait for the device: such a
    walk ends with bonus -1. CUDA never visits rows whose token is -1 (padding); an idle request, whose root is padding,
    gets path_length 0 and bonus -1.
    """
    batch, device, rule = len(params.seed), scores.device, rule or Match()
    logits, drawn = (None, scores) if scores.dtype == torch.int32 else (scores, None)
    if workspace is None:
        if logits is None:
            raise ValueError("workspace: tokens instead of logits need one, which has the size of the vocabulary")
        rows, vocab = logits.shape
        workspace = VerifyWorkspace.empty(batch, vocab, device=device, rows=rows, weights=not isinstance(rule, Match))
    accepted = Accepted(
        path=torch.empty(batch, tree.nodes, dtype=torch.int32, device=device),
        path_length=torch.empty(batch, dtype=torch.int32, device=device),
        bonus=torch.empty(batch, dtype=torch.int32, device=device),
        relaxed=torch.empty(batch, dtype=torch.int32, device=device),
    )
    needs_states = logits is not None and len(workspace.row_states) > 0
    row_states = workspace.row_states[: len(scores)] if needs_states else None
    _C.verify_tree(
        logits,
        drawn,
        sampled_trees(tree, params, history),
        NO_DRAFT_LOGITS if draft is None else _C.DraftLogits(draft.logits, draft.rows, draft.index, draft.replacement),
        accepted.paths(),
        _C.VerifyWorkspace(workspace.scores, workspace.counts, row_states, workspace.weights),
        rule.kernel,
        rule.options,
    )
    return accepted


def verify_tree_on_host(scores, tree, params, history, workspace=None, rule=None, draft=None) -> Accepted:
    """verify_tree for scores on another device: copies them to the host, where tree and history are read anyway."""
    tokens, parents, depths = tree.tokens.cpu(), tree.parents.cpu(), tree.depths.cpu()
    host = TreeBatch(tokens, parents, depths, tree.row_start.cpu(), None, tree.nodes)
    return verify_tree(scores.cpu(), host, params, history, workspace, rule, draft and draft.to(torch.device("cpu")))


def verify_tree_reference(logits, tree, params, history, workspace=None) -> Accepted:
    """Rule `match` in PyTorch."""
    starts, batch = tree.row_start.tolist(), len(params.seed)
    paths, bonuses = [], []
    for b in range(batch):
        tokens = tree.tokens[starts[b] : starts[b + 1]].tolist()
        parents = tree.parents[starts[b] : starts[b + 1]].tolist()
        committed = history.tokens[b, : int(history.length[b])].tolist()
        prompt = int(history.prompt_length[b])
        node, path = 0, [0]
        while True:
            row = logits[starts[b] + node].double()
            drawn = draw_reference(row, params, b, [*committed, *(tokens[i] for i in path[1:])], prompt)
            children = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == drawn]
            if not children:
                break
            node = children[0]
            path.append(node)
        paths.append(path)
        bonuses.append(drawn)
    columns = max((starts[b + 1] - starts[b] for b in range(batch)), default=0)
    return Accepted(
        path=torch.tensor([[*p, *[-1] * (columns - len(p))] for p in paths], dtype=torch.int32),
        path_length=torch.tensor([len(p) for p in paths], dtype=torch.int32),
        bonus=torch.tensor(bonuses, dtype=torch.int32),
        relaxed=torch.zeros(batch, dtype=torch.int32),
    )
