"""Cases of kernels that draft and verify trees: expansion, selection, verification."""

from __future__ import annotations

from dataclasses import fields

import torch

from specengine import ops
from specengine.bench.kernels import torch_reference
from specengine.bench.kernels.case import Case, binary_tree, call_each, int_tensor, returning
from specengine.bench.kernels.shapes import Shapes
from specengine.draft_trees.token_masks import mask_words, pack_masks
from specengine.ops.expand_backbone import BackboneExpander
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.select_nodes import SelectedTrees, select_nodes
from specengine.ops.verify_tree import VerifyWorkspace
from specengine.types import SamplingParams


def expand_case(s: Shapes, device: torch.device) -> Case:
    """Returns the case of the k best tokens per level of a backbone."""
    nbytes = 4 * s.levels * s.vocab
    logits = torch.randn(s.sets(nbytes), 1, s.levels, s.vocab, device=device)
    expand = BackboneExpander(1, s.levels, s.vocab, [s.k], device=device)
    root = int_tensor([3], device)
    ours = call_each(lambda x: expand(x, root).tokens[0, 1:], logits)
    torchs = call_each(lambda x: torch.log_softmax(x, dim=-1).topk(s.k).indices.flatten(), logits)
    return Case("expand_backbone", f"{s.levels} levels, k={s.k}", nbytes, {"": ours}, torchs)


def select_case(s: Shapes, device: torch.device) -> Case:
    """Returns the case of selecting nodes of a tree that grew by the k best children of its k best nodes.

    All candidates are children of the root.
    """
    candidates = 1 + s.k + s.levels * s.k**2
    nodes = s.trees[-1]
    nbytes = 4 * (4 * candidates + nodes * (4 + -(-nodes // 32)))
    parents = torch.zeros(1, candidates, dtype=torch.int32, device=device)
    limits = int_tensor([s.levels], device)
    parents[:, 0] = -1
    scores = -torch.rand(s.sets(nbytes), 1, candidates, device=device)
    scores[:, :, 0] = 0
    trees = SelectedTrees.empty(1, nodes, device)
    ours = [returning(trees.kept[0, 1:], select_nodes, parents, parents, parents + 1, x, limits, trees) for x in scores]
    torchs = call_each(lambda x: x[0, 1:].topk(nodes - 1, sorted=False).indices.sort().values + 1, scores)
    return Case("select_nodes", f"{nodes} of {candidates}", nbytes, {"": ours}, torchs)


def verify_case(s: Shapes, device: torch.device, params: SamplingParams, masked: bool = False) -> Case:
    """Returns the case of verifying one tree whose longest path is accepted.

    masked: whether masks forbid every second token; PyTorch fills the logits by masks of a byte per token.
    """
    nodes = s.trees[-1]
    nbytes = 4 * nodes * (s.vocab + (mask_words(s.vocab) if masked else 0))
    tree = binary_tree(nodes, device)
    count = s.sets(nbytes)
    logits = torch.randn(count, nodes, s.vocab, device=device)
    # The target prefers each node's first child, so that the walk reaches a leaf.
    first = torch.arange(1, nodes, 2, device=device)
    preferred = torch.arange(nodes, device=device, dtype=torch.int32) % (s.vocab - 1) + 1
    tree.tokens.copy_(preferred)
    logits[:, tree.parents[first].long(), preferred[first].long()] = 100.0
    history = TokenHistory(int_tensor([[1] * 64], device), int_tensor([64], device), int_tensor([32], device))
    host = SamplingTable.of([params], [0])
    table = SamplingTable(**{f.name: getattr(host, f.name).to(device) for f in fields(SamplingTable)})
    workspace = VerifyWorkspace.empty(1, s.vocab, device=device, rows=nodes)
    depth = nodes.bit_length()
    allowed = torch.arange(s.vocab, device=device).expand(nodes, -1) % 2 == 0
    allowed = allowed.index_fill(1, preferred.long(), True)
    packed = pack_masks(allowed) if masked else None

    def verify(x: torch.Tensor) -> torch.Tensor:
        return ops.verify_tree.verify_tree(x, tree, table, history, workspace, masks=packed).path[0, :depth]

    def verify_by_torch(x: torch.Tensor) -> torch.Tensor:
        x = x.masked_fill(~allowed, -torch.inf) if masked else x
        return torch_reference.verify(x, tree.tokens, tree.parents, params, depth)

    ours, torchs = call_each(verify, logits), call_each(verify_by_torch, logits)
    sampling = f"T={params.temperature:g}" + (f", top-p {params.top_p:g}" if params.top_p < 1 else "")
    sampling += ", masks" if masked else ""
    return Case("verify_tree", f"N={nodes}, {sampling}", nbytes, {"": ours}, torchs)
