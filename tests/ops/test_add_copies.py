"""Copies among candidates: which text, below which candidate, and with which scores; then cut to a tree."""

import math

import pytest
import torch

from specengine.ops.growth.add_copies import CLASSES, add_copies, add_copies_reference
from specengine.ops.select_nodes import SelectedTrees, select_limited

CHANCES = torch.tensor([0.25, 0.5, 0.625, 0.75, 0.875]).log()
TEXT = [1, 2, 3, 9, 1, 2, 4, 1, 2]  # 2 3 and 2 4 before: the newest match of 1 2 is followed by 4 1 2
Node = tuple[int, int, float]  # token, parent, chance


def columns_of(backend, *requests: list[Node]):
    """Candidates below a root of each request, padded to as many."""
    most = max(map(len, requests))
    rows = []
    for nodes in requests:
        row = [(TEXT[-1], -1, 0, 0.0)]
        for token, parent, chance in nodes:
            row.append((token, parent, row[parent][2] + 1, row[parent][3] + math.log(chance)))
        rows.append(row + [(-1, -1, -1, 0.0)] * (most - len(nodes)))
    kinds = (torch.int32, torch.int32, torch.int32, torch.float32)
    return tuple(
        backend.put(torch.tensor([[node[i] for node in row] for row in rows], dtype=kind))
        for i, kind in enumerate(kinds)
    )


def joined(backend, columns, known, texts, length=4, active=None, ngrams=(1, 64)):
    history = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    active = torch.tensor(active or [1] * len(texts), dtype=torch.int32)
    known = torch.tensor(known, dtype=torch.int32)
    arguments = [backend.put(each) for each in (known, history, lengths, active, CHANCES)]
    found, has = add_copies(columns, *arguments, length, ngrams)
    expected, expected_has = add_copies_reference(columns, *arguments, length, ngrams)
    rows = [list(map(list, zip(*(column[b].tolist() for column in found), strict=True))) for b in range(len(texts))]
    assert has.bool().tolist() == expected_has
    for ours, theirs in zip(rows, expected, strict=True):
        assert [node[:3] for node in ours] == [node[:3] for node in theirs]
        assert [node[3] for node in ours] == pytest.approx([node[3] for node in theirs], rel=1e-5, abs=1e-5)
    return rows, found, has


def test_a_chain_that_no_candidate_begins_hangs_below_the_root(cuda_backend):
    (row,), _, has = joined(cuda_backend, columns_of(cuda_backend, [(7, 0, 0.5), (8, 1, 0.5)]), [1], [TEXT])
    assert has.tolist() == [1]
    assert [node[:3] for node in row[3:]] == [[4, 0, 1], [1, 3, 2], [2, 4, 3], [4, 5, 4]]
    assert [math.exp(node[3]) for node in row[3:]] == pytest.approx([0.5, 0.25, 0.25 * 0.625, 0.25 * 0.625**2])


def test_candidates_that_begin_the_chain_keep_the_higher_score(cuda_backend):
    candidates = [(4, 0, 0.75), (7, 0, 0.2), (1, 2, 0.9), (1, 1, 0.125), (9, 4, 0.5)]  # 7 -> 1 is another path
    (row,), _, _ = joined(cuda_backend, columns_of(cuda_backend, candidates), [1], [TEXT])
    assert [math.exp(node[3]) for node in row[1:6]] == pytest.approx([0.75, 0.2, 0.18, 0.25, 0.75 * 0.125 * 0.5])
    assert [node[:3] for node in row[6:]] == [[-1, -1, -1], [-1, -1, -1], [2, 4, 3], [4, 8, 4]]


def test_candidates_that_are_not_known_are_left_out_and_the_chain_stays(cuda_backend):
    (row,), found, has = joined(cuda_backend, columns_of(cuda_backend, [(4, 0, 0.75), (7, 0, 0.2)]), [0], [TEXT])
    assert [node[2] for node in row] == [0, -1, -1, 1, 2, 3, 4] and row[3][1] == 0
    one = cuda_backend.put(torch.ones(1, dtype=torch.int32))
    room = SelectedTrees.empty(1, 4, cuda_backend.device)
    trees = select_limited(found, has, 9 * one, 20 * one, one, 4, room)
    assert trees.tokens.tolist() == [[2, 4, 1, 2]] and trees.parents.tolist() == [[-1, 0, 1, 2]]


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_all_kinds_equal_the_reference(cuda_backend, seed):
    draw = torch.Generator().manual_seed(seed)

    def some(count, end):
        return torch.randint(0, end, (count,), generator=draw).tolist()

    requests = []
    for size in (40, 3, 17, 25):
        parents = [some(1, index + 1)[0] for index in range(size)]
        requests.append(list(zip(some(size, 4), parents, [0.25] * size, strict=True)))
    texts = [some(300, 4), some(1, 4), some(40, 4), some(9, 4)]
    joined(cuda_backend, columns_of(cuda_backend, *requests), [1, 1, 0, 1], texts, length=64, active=[1, 1, 1, 0])
    joined(cuda_backend, columns_of(cuda_backend, *requests), [1, 1, 1, 1], texts, length=1, ngrams=(5, 6))


def test_bad_lengths_are_refused(cuda_backend):
    columns = columns_of(cuda_backend, [(7, 0, 0.5)])
    for length in (0, 65):
        with pytest.raises(ValueError, match=r"^joined: expected 3 to 66 columns, got"):
            joined(cuda_backend, columns, [1], [TEXT], length=length)
    assert len(CHANCES) == CLASSES
