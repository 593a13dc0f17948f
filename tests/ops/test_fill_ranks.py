"""The candidates of trees of ranks, against what draft_trees/rank_paths.py makes of the same children."""

from math import exp
from typing import NamedTuple

import pytest
import torch

from specengine.draft_trees.rank_paths import RankCandidates, RankTree
from specengine.ops.growth.fill_ranks import fill_ranks
from specengine.ops.sampling_table import TokenHistory

PATHS = [[0], [1], [0, 0], [0, 2], [1, 1], [0, 0, 0], [1, 1, 2]]


class Best(NamedTuple):
    tokens: torch.Tensor
    scores: torch.Tensor


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def filled(backend, tokens, scores, levels, by_request, token_ids=None):
    """Returns the tree's candidates, and its columns; tokens, scores: [B, levels, k]. Roots are 10 and 11."""
    candidates = RankCandidates(RankTree.of(PATHS), backend.device)
    rows = [each if by_request else each.transpose(0, 1) for each in (tokens, scores)]
    padded = [torch.nn.functional.pad(each.flatten(0, 1), (1, 0), value=-7).contiguous() for each in rows]
    texts, lengths = backend.put(ints([[9, 10, 77], [11, 77, 77]])), backend.put(ints([2, 1]))
    ids = None if token_ids is None else backend.put(ints(token_ids))
    history = TokenHistory(texts, lengths, lengths)
    found = fill_ranks(Best(*map(backend.put, padded)), ids, candidates.columns(levels), history, by_request=by_request)
    return candidates, [each.cpu() for each in found]


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_candidates_are_the_trees_of_rank_paths(cuda_backend, levels, by_request):
    tokens, scores = torch.arange(100, 100 + 2 * levels * 4).view(2, levels, 4).int(), -torch.rand(2, levels, 4)
    candidates, found = filled(cuda_backend, tokens, scores, levels, by_request)
    for b, root in enumerate((10, 11)):
        tree = candidates.tree(root, tokens[b].tolist(), scores[b].tolist(), levels)
        own, parents, depths, reached = (each[b].tolist() for each in found)
        assert (own, parents) == (tree.tokens, tree.parents)
        assert depths == [0, *(len(path) for path in PATHS if len(path) <= levels)]
        chances = [exp(score - reached[max(0, above)]) for score, above in zip(reached, parents, strict=True)]
        assert chances == pytest.approx(tree.chances, rel=1e-5)


def test_tokens_become_the_targets_and_those_that_are_missing_are_padding(cuda_backend):
    tokens = ints([[[0, 1, 2], [2, 1, 0]], [[-1, 1, 5], [-1, 2, 0]]])
    _, (own, _, depths, _) = filled(cuda_backend, tokens, -torch.ones(2, 2, 3), 2, True, token_ids=[50, 60, 70])
    assert own.tolist() == [[10, 50, 60, 70, 50, 60], [11, -1, 60, -1, 50, 70]]
    assert depths.tolist() == [[0, 1, 1, 2, 2, 2], [0, -1, 1, -1, 2, 2]]


def test_rows_that_do_not_fit_are_refused(cuda_backend):
    with pytest.raises(ValueError, match=r"^best_tokens: expected 2 columns or more, got 1"):
        filled(cuda_backend, ints([[[], []]] * 2), torch.zeros(2, 2, 0), 2, True)
