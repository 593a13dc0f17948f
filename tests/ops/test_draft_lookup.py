"""draft_lookup against its reference: which earlier occurrence it continues, and how its chains are laid out."""

import random

import pytest
import torch

from specengine.ops.draft_lookup import draft_lookup, draft_lookup_reference
from tests.ops.cases import ancestor_bits, chain

NGRAMS = (1, 16)


def lookup(backend, rows, finals, active, nodes, ngrams=NGRAMS):
    """The drafted tree batch and the reference's chains; histories are padded with a token that would stand out."""
    columns = max(len(row) for row in rows) + 3
    history = torch.tensor([[*row, *[77] * (columns - len(row))] for row in rows], dtype=torch.int32)
    length = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    final, running = torch.tensor(finals, dtype=torch.int32), torch.tensor(active, dtype=torch.int32)
    starts = torch.arange(0, len(rows) * nodes + 1, nodes, dtype=torch.int32)
    arguments = (history, length, final, running)
    tree = draft_lookup(*(backend.put(t) for t in (*arguments, starts)), nodes, ngrams)
    return tree, draft_lookup_reference(*arguments, nodes, ngrams)


def check(tree, chains, nodes):
    """The rows of every request are its chain, then padding."""
    words = tree.ancestors.shape[1]
    for b, expected in enumerate(chains):
        rows, used = slice(b * nodes, (b + 1) * nodes), len(expected)
        padding = [-1] * (nodes - used)
        assert tree.tokens[rows].tolist() == [*expected, *padding]
        assert tree.parents[rows].tolist() == [*range(-1, used - 1), *padding]
        assert tree.depths[rows].tolist() == [*range(used), *padding]
        bits = torch.zeros(nodes, words, dtype=torch.int32)
        if used:
            bits[:used] = ancestor_bits([chain(used)], words)
        assert torch.equal(tree.ancestors[rows].cpu(), bits)


def test_the_longest_match_wins_and_of_equals_the_newest(cuda_backend):
    rows = [[1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [4, 6, 4, 7, 4], [1, 2, 3]]
    tree, chains = lookup(cuda_backend, rows, [100] * 3, [1] * 3, 4)
    assert chains == [[3, 9, 5, 2], [4, 7, 4, 7], [3]]  # the second one runs into its own draft
    check(tree, chains, 4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("nodes", [1, 2, 31, 33, 64, 256])
@pytest.mark.parametrize("ngrams", [(1, 1), (1, 16), (3, 5)])
def test_random_histories_give_the_reference_s_chains(cuda_backend, nodes, ngrams):
    rng = random.Random(nodes)
    lengths = (1, 2, 3, 20, 255, 256, 257, 600)
    rows = [rng.choices(range(2 + 3 * (i % 3)), k=length) for i, length in enumerate(lengths)]
    finals = [len(row) + rng.randint(1, 300) for row in rows]
    tree, chains = lookup(cuda_backend, rows, finals, [1] * len(rows), nodes, ngrams)
    check(tree, chains, nodes)
    assert nodes == 1 or any(len(c) > 1 for c in chains)


def test_a_chain_ends_where_the_request_will(cuda_backend):
    row = [1, 2, 3, 4, 5, 6, 1]
    for left in (1, 2, 3, 50):  # tokens it may still commit, the bonus token among them
        tree, chains = lookup(cuda_backend, [row], [len(row) + left], [1], 8)
        assert len(chains[0]) == min(left, 8)
        check(tree, chains, 8)


def test_idle_requests_are_padding(cuda_backend):
    rows = [[5, 6, 5], [5, 6, 5], [5, 6, 5]]
    tree, chains = lookup(cuda_backend, rows, [9] * 3, [0, 1, 0], 3)
    assert [len(c) for c in chains] == [0, 3, 0]
    check(tree, chains, 3)


@pytest.mark.parametrize("ngrams", [(0, 3), (4, 3), (1, 65)])
def test_impossible_lengths_of_matches_are_refused(cuda_backend, ngrams):
    with pytest.raises(ValueError, match=r"^max_ngram: "):
        lookup(cuda_backend, [[1, 2]], [9], [1], 2, ngrams)
