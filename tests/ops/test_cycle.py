"""Verify, compact and attend together: after a cycle the cache is the one plain decoding would have left."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.ops.compact_kv import compact_kv
from specengine.ops.tree_attention import tree_attention
from specengine.ops.verify_tree import verify_tree
from tests.ops.cases import CACHE_DTYPES, Cache, ancestor_bits, chain, comb, make_cache, randn, random_tree, star
from tests.ops.verifying import PARAMS, make_batch

SHAPES = (random_tree, chain, star, comb)

batches = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.integers(1, 90), st.integers(0, 200), st.sampled_from(sorted(PARAMS))),
    min_size=1,
    max_size=4,
)


def attend(cache: Cache, q: torch.Tensor, ancestors: torch.Tensor | None) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    tree_attention(q, cache.view(), ancestors, out, 0.3, 0)
    return out


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches, seed=st.integers(0, 2**32))
def test_a_cycle_leaves_what_plain_decoding_would_have_left(dtype, batch, seed):
    trees, lengths = [shape(nodes) for shape, nodes, _, _ in batch], [length for _, _, length, _ in batch]
    verifying = make_batch(trees, [PARAMS[name] for *_, name in batch], 30, seed=seed)
    cache = make_cache(trees, lengths, 2, 12, dtype, seed=seed % 1000)
    starts = cache.row_start.tolist()
    q = randn(starts[-1], 4, 12, seed=seed % 997)
    attended = attend(cache, q, ancestor_bits(trees))
    accepted = verify_tree(*verifying.arguments())

    paths = [row[: int(n)].tolist() for row, n in zip(accepted.path, accepted.path_length, strict=True)]
    plain, own = [], []  # per request: the rows plain decoding writes one after the other, the path's row numbers
    for b, (tree, length, path) in enumerate(zip(trees, lengths, paths, strict=True)):
        assert path[0] == 0 and [tree[node] for node in path[1:]] == path[:-1], "a path follows parents from the root"
        keys, values = cache.rows(b, length + len(tree))
        slots = [*range(length), *(length + node for node in path)]
        plain.append((keys[slots], values[slots]))
        own.append([starts[b] + node for node in path])

    compact_kv(cache.k[None], cache.v[None], cache.block_table, cache.lengths, accepted.path, accepted.path_length)
    for b, (keys, values) in enumerate(plain):
        got = cache.rows(b, len(keys))
        assert torch.equal(got[0], keys) and torch.equal(got[1], values)

    # Prefill of the committed tokens over the plain cache attends with the bits the tree had.
    chains = make_cache([chain(len(path)) for path in paths], lengths, 2, 12, dtype, seed=3, rows=plain)
    rows = [row for path in own for row in path]
    assert torch.equal(attend(chains, q[rows].contiguous(), None), attended[rows])


@pytest.mark.full
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_corrupt_integers_are_refused_or_harmless(seed):
    """Random values in every integer argument: the ops may refuse or answer, never read or write out of bounds.

    The sanitizer build is what makes this test sharp.
    """
    from tests.ops.arguments import OPS, call, tensors_of

    rng = random.Random(seed)
    for op, make in OPS.items():
        for _ in range(20):
            arguments = make()
            tensors = tensors_of(arguments).values()
            integers = [t for t in tensors if t.dtype in (torch.int32, torch.int64) and t.numel()]
            if not integers:
                continue
            for tensor in rng.sample(integers, rng.randint(1, min(3, len(integers)))):
                flat = tensor.view(-1)
                edges = [-(2**31), -65, -2, -1, 0, 1, 2, 5, 31, 32, 63, 64, 255, 256, 257, 2**31 - 1]
                flat[rng.randrange(len(flat))] = rng.choice(edges)
            counts = arguments.get("counts")
            if counts is not None:
                counts.zero_()  # a workspace that must be zero
            try:
                call(op, arguments)
            except ValueError as error:
                assert str(error).split(":")[0] in {part for name in arguments for part in (name, name.split(".")[-1])}
