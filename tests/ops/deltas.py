"""Layers of gated delta rule, their states and trees, for the tests of the ops."""

import torch

from specengine import _C
from specengine.ops.gated_delta.matrices import GatedDelta
from tests.ops.cases import ancestor_bits

EPS = 1e-6
SHAPES = [(2, 4, 24, 20), (1, 1, 3, 5), (2, 2, 16, 16), (3, 6, 128, 128)]  # key heads, value heads, Dk, Dv


def small_layer(key_heads=2, value_heads=4, key_dim=24, value_dim=20, tiled=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return GatedDelta(
        conv=torch.randn(4, channels, generator=generator) / 2,
        decay=-2 * torch.rand(value_heads, generator=generator),
        dt_bias=torch.randn(value_heads, generator=generator),
        norm=torch.rand(value_dim, generator=generator) + 0.5,
        key_heads=key_heads,
        value_heads=value_heads,
        tiled=tiled,
    )


def columns_of(layer):
    return layer.conv.shape[1] + layer.value_heads * len(layer.norm) + 2 * layer.value_heads


def new_states(layer, rows, slots, final=False, layers=2, pool=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    channels, heads, dim = layer.conv.shape[1], layer.value_heads, len(layer.norm)
    keys = (channels - heads * dim) // 2 // layer.key_heads
    return _C.DeltaStates(
        torch.randn(pool, layers, heads, keys, dim, generator=generator) / 3,
        torch.randn(pool, layers, 3, channels, generator=generator),
        torch.tensor(slots, dtype=torch.int32),
        torch.zeros(1 if final else layers, rows, 2 * channels + 2 * heads),
        final,
    )


def copied(states):
    return _C.DeltaStates(*(x.clone() if isinstance(x, torch.Tensor) else x for x in states))


def random_tree(nodes, random):
    """Parents of a tree in which many branches will be rejected."""
    return [-1, *(random.randrange(max(0, node - 4), node) for node in range(1, nodes))]


def starts(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)


def run(op, layer, rows, states, number, trees=None, counts=None, dtype=torch.float32):
    counts = [len(tree) for tree in trees] if trees else counts
    bits = ancestor_bits(trees) if trees else None
    out = rows.new_empty(len(rows), layer.value_heads * len(layer.norm), dtype=dtype)
    row_start, bits = starts(counts).to(rows.device), None if bits is None else bits.to(rows.device)
    op(rows, layer, states, number, row_start, bits, out, EPS)
    return out
