"""What the kernels are measured at: shapes of a model, each beside the same computation in PyTorch.

PyTorch's side is given what suits it best: contiguous caches instead of pages, inputs in the type it computes in, heads
folded into rows. Weights, caches and logits come from several sets of buffers in turn, more than a cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

import torch
import torch.nn.functional as F

from specengine import ops
from specengine._C import PAGE_SIZE, KVCacheView
from specengine.bench.kernels.case import Case, Kernels, Shapes, each, writing
from specengine.bench.kernels.linears import linear_cases
from specengine.bench.kernels.torch_kernels import rope_and_write, verify
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.ops.expand_backbone import BackboneExpander
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.select_nodes import SelectedTrees, select_nodes
from specengine.ops.verify_tree import VerifyWorkspace
from specengine.types import SamplingParams


def cases(shapes: Shapes, device: torch.device, kernels: Kernels) -> Iterator[Case]:
    """Made one by one, as they are large."""
    for nodes in shapes.trees:
        for prefix in shapes.prefixes:
            yield _attention(shapes, device, kernels, nodes, prefix)
    yield _compact(shapes, device, kernels)
    yield _expand(shapes, device)
    yield _select(shapes, device)
    yield _verify(shapes, device, SamplingParams())
    yield _verify(shapes, device, SamplingParams(temperature=0.8, top_p=0.95))
    yield from linear_cases(shapes, device, kernels)
    for rows in (shapes.rows[0], shapes.rows[-1]):
        yield _rms_norm(shapes, device, kernels, rows)
        yield _silu_mul(shapes, device, kernels, rows)
        yield _rope_cache(shapes, device, kernels, rows)


def _ints(values, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(device)


def _tree(nodes: int, device: torch.device) -> TreeBatch:
    """Two children per node, numbered level by level."""
    return TreeBatch.of([DraftTree([1] * nodes, [(node - 1) // 2 for node in range(nodes)])], device, masked=True)


def _attention(s: Shapes, device: torch.device, kernels: Kernels, nodes: int, prefix: int) -> Case:
    slots, group, tree = prefix + nodes, s.heads // s.kv_heads, _tree(nodes, device)
    nbytes = 2 * 2 * slots * s.kv_heads * s.head_dim
    count, pages = s.sets(nbytes), -(-slots // PAGE_SIZE)
    shape = (count, pages, s.kv_heads, PAGE_SIZE, s.head_dim)
    k, v = (torch.randn(shape, device=device).to(kernels.cache) for _ in range(2))
    table = torch.randperm(pages, device=device, dtype=torch.int32)[None]
    q = torch.randn(nodes, s.heads, s.head_dim, device=device)
    out = torch.empty(nodes, s.heads, s.head_dim, dtype=kernels.rows, device=device)
    lengths, scale = _ints([prefix], device), s.head_dim**-0.5
    attention = ops.tree_attention
    ours = [
        writing(
            *(out, attention.tree_attention, q, KVCacheView(k[i], v[i], table, lengths, tree.row_start, 0)),
            *(tree.ancestors, out, scale, 0),
        )
        for i in range(count)
    ]

    # The query heads that share a key head become rows of it, so that keys need not be repeated.
    folded = q.view(nodes, s.kv_heads, group, -1).permute(1, 2, 0, 3).reshape(1, s.kv_heads, group * nodes, -1)
    folded, mask = folded.to(kernels.torch), None
    if nodes > 1:
        assert tree.ancestors is not None  # masked
        node = torch.arange(nodes, device=device)
        seen = tree.ancestors[:, node // 32] >> (node % 32).int() & 1 == 1
        aligned = -(-slots // 16) * 16  # the length of a row, which else is copied in every call
        mask = torch.zeros(group * nodes, aligned, dtype=kernels.torch, device=device)[:, :slots]
        mask[:, prefix:].masked_fill_(~seen.repeat(group, 1), -math.inf)
    gathered = [attention.gather_slots(k[i], v[i], table[0], slots) for i in range(count)]
    contiguous = [tuple(x.to(kernels.torch).transpose(0, 1).contiguous()[None] for x in pair) for pair in gathered]

    def torch_attention(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        found = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return found.view(s.kv_heads, group, nodes, -1).permute(2, 0, 1, 3).flatten(1, 2)

    torchs = each(lambda pair: torch_attention(*pair), contiguous)
    return Case("tree_attention", f"N={nodes}, {prefix} tokens", nbytes + q.nbytes + out.nbytes, {"": ours}, torchs)


def _compact(s: Shapes, device: torch.device, kernels: Kernels) -> Case:
    nbytes = 2 * 2 * 2 * s.accepted * s.layers * s.kv_heads * s.head_dim  # read and written
    length, path = PAGE_SIZE // 2, [7 * (i + 1) % PAGE_SIZE for i in range(s.accepted)]
    count = s.sets(nbytes)
    shape = (s.layers, 2 * count, s.kv_heads, PAGE_SIZE, s.head_dim)
    k, v = (torch.randn(shape, device=device).to(kernels.cache) for _ in range(2))
    kept = _ints([sorted(path)], device)
    place = (_ints([length], device), kept, _ints([s.accepted], device))
    ours = [
        writing(None, ops.compact_kv.compact_kv, k, v, _ints([[2 * i, 2 * i + 1]], device), *place)
        for i in range(count)
    ]
    flat = (count, s.layers, s.kv_heads, 2 * PAGE_SIZE, s.head_dim)
    source, target = kept[0].long() + length, torch.arange(s.accepted, device=device) + length

    def copy(keys: torch.Tensor, values: torch.Tensor) -> None:
        for cache in (keys, values):
            cache.index_copy_(2, target, cache.index_select(2, source))

    torchs = each(lambda i: copy(k.view(flat)[i], v.view(flat)[i]), range(count))
    return Case("compact_kv", f"{s.layers} layers, {s.accepted} rows", nbytes, {"": ours}, torchs)


def _expand(s: Shapes, device: torch.device) -> Case:
    nbytes = 4 * s.levels * s.vocab
    logits = torch.randn(s.sets(nbytes), 1, s.levels, s.vocab, device=device)
    expand, root = BackboneExpander(1, s.levels, s.vocab, [s.k], device=device), _ints([3], device)
    ours = each(lambda x: expand(x, root).tokens[0, 1:], logits)
    torchs = each(lambda x: torch.log_softmax(x, dim=-1).topk(s.k).indices.flatten(), logits)
    return Case("expand_backbone", f"{s.levels} levels, k={s.k}", nbytes, {"": ours}, torchs)


def _select(s: Shapes, device: torch.device) -> Case:
    """The candidates of a tree that grows by the k best children of each of the k best nodes, all beside the root."""
    candidates, nodes = 1 + s.k + s.levels * s.k**2, s.trees[-1]
    nbytes = 4 * (4 * candidates + nodes * (4 + -(-nodes // 32)))
    parents, limits = torch.zeros(1, candidates, dtype=torch.int32, device=device), _ints([s.levels], device)
    parents[:, 0] = -1
    scores = -torch.rand(s.sets(nbytes), 1, candidates, device=device)
    scores[:, :, 0] = 0
    trees = SelectedTrees.empty(1, nodes, device)
    ours = [writing(trees.kept[0, 1:], select_nodes, parents, parents, parents + 1, x, limits, trees) for x in scores]
    torchs = each(lambda x: x[0, 1:].topk(nodes - 1, sorted=False).indices.sort().values + 1, scores)
    return Case("select_nodes", f"{nodes} of {candidates}", nbytes, {"": ours}, torchs)


def _verify(s: Shapes, device: torch.device, params: SamplingParams) -> Case:
    nodes = s.trees[-1]
    nbytes, tree = 4 * nodes * s.vocab, _tree(nodes, device)
    count = s.sets(nbytes)
    logits = torch.randn(count, nodes, s.vocab, device=device)
    # Each node's first child is what the target wants there, so that the walk goes to the bottom.
    first = torch.arange(1, nodes, 2, device=device)
    wanted = torch.arange(nodes, device=device, dtype=torch.int32) % (s.vocab - 1) + 1
    tree.tokens.copy_(wanted)
    logits[:, tree.parents[first].long(), wanted[first].long()] = 100.0
    history = TokenHistory(_ints([[1] * 64], device), _ints([64], device), _ints([32], device))
    host = SamplingTable.of([params], [0])
    table = SamplingTable(**{f.name: getattr(host, f.name).to(device) for f in fields(SamplingTable)})
    workspace, depth = VerifyWorkspace.empty(1, s.vocab, device=device, rows=nodes), nodes.bit_length()
    ours = each(lambda x: ops.verify_tree.verify_tree(x, tree, table, history, workspace).path[0, :depth], logits)
    torchs = each(lambda x: verify(x, tree.tokens, tree.parents, params, depth), logits)
    how = f"T={params.temperature:g}" + (f", top-p {params.top_p:g}" if params.top_p < 1 else "")
    return Case("verify_tree", f"N={nodes}, {how}", nbytes, {"": ours}, torchs)


def _rms_norm(s: Shapes, device: torch.device, kernels: Kernels, rows: int) -> Case:
    residual, delta = (torch.randn(rows, s.hidden, device=device) for _ in range(2))
    weight = torch.rand(s.hidden, device=device)
    out = torch.empty(rows, s.hidden, dtype=kernels.rows, device=device)
    other = residual.clone()

    def torch_norm() -> torch.Tensor:
        return F.rms_norm(other.add_(delta), (s.hidden,), weight, 1e-5).to(out.dtype)

    nbytes = rows * s.hidden * (4 + 4 + 4) + out.nbytes + 4 * s.hidden
    ours = writing(out, ops.layer.rms_norm, residual, delta, weight, out, 1e-5)
    return Case("rms_norm", f"M={rows}", nbytes, {"": [ours]}, [torch_norm])


def _silu_mul(s: Shapes, device: torch.device, kernels: Kernels, rows: int) -> Case:
    x = torch.randn(rows, 2 * s.intermediate, device=device)
    out = torch.empty(rows, s.intermediate, dtype=kernels.rows, device=device)
    gate, up = x.chunk(2, dim=1)
    ours = writing(out, ops.layer.silu_mul, x, out)
    nbytes = x.nbytes + out.nbytes
    return Case("silu_mul", f"M={rows}", nbytes, {"": [ours]}, [lambda: (F.silu(gate) * up).to(out.dtype)])


def _rope_cache(s: Shapes, device: torch.device, kernels: Kernels, rows: int) -> Case:
    width, prefix = (s.heads + 2 * s.kv_heads) * s.head_dim, s.prefixes[0]
    qkv = torch.randn(rows, width, device=device)
    cos, sin = (torch.rand(prefix + rows, s.head_dim // 2, device=device) for _ in range(2))
    pages, tree = -(-(prefix + rows) // PAGE_SIZE), _tree(rows, device)
    shape = (pages, s.kv_heads, PAGE_SIZE, s.head_dim)
    k, v = (torch.zeros(shape, dtype=kernels.cache, device=device) for _ in range(2))
    table, lengths = torch.arange(pages, dtype=torch.int32, device=device)[None], _ints([prefix], device)
    q = torch.empty(rows, s.heads, s.head_dim, device=device)
    cache = KVCacheView(k, v, table, lengths, tree.row_start, 0)
    ours = writing(q, ops.layer.rope_cache, qkv, cos, sin, None, None, tree.depths, cache, q, 1e-5)
    keys, values = (torch.zeros(pages * PAGE_SIZE, s.kv_heads, s.head_dim, dtype=k.dtype, device=device) for _ in "kv")
    at = (prefix + tree.depths.long(), prefix + torch.arange(rows, device=device))
    nbytes = rows * (4 * width + 4 * s.heads * s.head_dim + 2 * 2 * s.kv_heads * s.head_dim + 4 * s.head_dim)
    return Case(
        *("rope_cache", f"M={rows}", nbytes, {"": [ours]}),
        [lambda: rope_and_write(qkv.view(rows, -1, s.head_dim), cos, sin, keys, values, *at)],
    )
