"""The pairs that wait for a drafter between captured cycles: how they are kept, and laid out as rows."""

import pytest
import torch

from specengine.ops.growth.pairs import Masks, keep_last, keep_pairs, pair_rows
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.verify_tree import Accepted
from tests.ops.cases import ancestor_bits, chain


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def put(backend, *columns):
    return (backend.put(ints(column)) for column in columns)


def laid_out(backend, texts, counts, first, rows, unread=0, room=80, blocks=None, masks=None):
    text = torch.full((len(texts), room), 77, dtype=torch.int32)
    for b, own in enumerate(texts):
        text[b, : len(own)] = torch.tensor(own)
    lengths = [len(own) for own in texts]
    starts = [*range(0, len(texts) * rows + 1, rows)]
    tokens, length, prompt, count, begin, start = (
        backend.put(each) if isinstance(each, torch.Tensor) else next(put(backend, each))
        for each in (text, lengths, lengths, counts, first, starts)
    )
    return pair_rows(TokenHistory(tokens, length, prompt), count, begin, start, rows, unread, blocks, masks)


@pytest.mark.parametrize("rows", [4, 33])
def test_pairs_are_chains_of_the_tokens_behind_their_positions_and_padding(cuda_backend, rows):
    texts = [[*range(10, 16)], [*range(20, 60)], [5]]
    counts, first = [2, rows, 0], [3, 6, 0]
    found = laid_out(cuda_backend, texts, counts, first, rows)
    for b, (text, count, begin) in enumerate(zip(texts, counts, first, strict=True)):
        own, padding = slice(b * rows, (b + 1) * rows), [-1] * (rows - count)
        assert found.rows.tokens[own].tolist() == [*text[begin + 1 : begin + 1 + count], *padding]
        assert found.rows.parents[own].tolist() == [*range(-1, count - 1), *padding]
        assert found.rows.depths[own].tolist() == [*range(count), *padding]
        bits = torch.zeros(rows, -(-rows // 32), dtype=torch.int32)
        if count:
            bits[:count] = ancestor_bits([chain(count)], bits.shape[1])
        assert found.rows.ancestors[own].cpu().equal(bits)
    assert found.last.tolist() == [1, 2 * rows - 1, 2 * rows]
    assert found.roots.tolist() == [[15], [59], [5]]
    assert found.last_pairs.tolist() == [4, 5 + rows, -1] and found.next_pairs.tolist() == [5, 6 + rows, 0]


def test_blocks_begin_with_the_last_committed_tokens(cuda_backend):
    blocks = cuda_backend.put(torch.full((2, 3), 9, dtype=torch.int32))
    found = laid_out(cuda_backend, [[1, 2, 3, 4], [5]], [1, 0], [0, 0], 2, blocks=blocks)
    assert blocks.tolist() == [[4, 9, 9], [5, 9, 9]] and found.roots.tolist() == [[4], [5]]
    with pytest.raises(ValueError, match=r"^blocks: expected shape \[B, S\] with B=2"):
        laid_out(cuda_backend, [[1, 2, 3, 4], [5]], [1, 0], [0, 0], 2, blocks=blocks[:1])


def test_masks_lie_behind_the_last_pairs(cuda_backend):
    texts, counts, first = [[*range(10, 16)], [*range(20, 60)], [5]], [2, 4, 0], [3, 6, 0]
    found = laid_out(cuda_backend, texts, counts, first, rows=7, masks=Masks(99, 3))
    assert found.rows.tokens.view(3, 7).tolist() == [
        [14, 15, 99, 99, 99, -1, -1],
        [27, 28, 29, 30, 99, 99, 99],
        [-1] * 7,
    ]
    assert found.rows.parents.view(3, 7).tolist() == [
        [-1, 0, 1, 2, 3, -1, -1],
        [-1, 0, 1, 2, 3, 4, 5],
        [-1] * 7,
    ]
    assert found.rows.ancestors[[4, 5, 13]].flatten().tolist() == [31, 0, 127]
    assert found.last.view(3, 4).tolist() == [[1, 2, 3, 4], [10, 11, 12, 13], [14, 15, 16, 17]]
    own, other, idle = found.above.view(3, 7).tolist()  # four pairs of each have states, the thirteenth is of masks
    assert own[:5] == [0, 1, 12, 12, 12] and other == [4, 5, 6, 7, 12, 12, 12] and max(*own, *idle) <= 12
    assert found.last_pairs.tolist() == [4, 9, -1] and found.next_pairs.tolist() == [5, 10, 0]
    with pytest.raises(ValueError, match=r"^rows.tokens: 3 rows per request have no room for a pair and 3 masks"):
        laid_out(cuda_backend, texts, counts, first, rows=3, masks=Masks(99, 3))
    with pytest.raises(ValueError, match=r"^masks: expected 0 or more, of a token from 0, got 3, -1"):
        laid_out(cuda_backend, texts, counts, first, rows=7, masks=Masks(-1, 3))


def test_the_last_pairs_may_be_left_out(cuda_backend):
    found = laid_out(cuda_backend, [[1, 2, 3, 4], [1, 2]], [3, 1], [0, 0], 3, unread=1)
    assert found.rows.tokens.tolist() == [2, 3, -1, -1, -1, -1]


def kept_pairs(backend, path, lengths, ends, counts, first, add, rows=3, room=4, dtype=torch.float32):
    """A cycle of two requests with `rows` rows each, whose hidden states are their numbers."""
    hidden = torch.arange(2.0 * rows)[:, None].expand(-1, 5).to(dtype).contiguous()
    accepted = Accepted.empty(2, len(path[0]), device=backend.device)
    for name, values in (("path", path), ("path_length", lengths)):
        getattr(accepted, name).copy_(torch.tensor(values))
    (start, count, begin, end) = put(backend, [0, rows, 2 * rows], counts, first, ends)
    kept = backend.put(torch.full((3, room, 5), -1.0))
    keep_pairs(backend.put(hidden), start, accepted, TokenHistory(end[:, None], end, end), kept, count, begin, add=add)
    assert kept.std(-1).max() == 0
    return kept[:, :, 0].tolist(), count.tolist(), begin.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_cycle_leaves_the_pairs_of_its_path(cuda_backend, dtype):
    kept, counts, first = kept_pairs(
        cuda_backend, [[0, 2, -1], [0, -1, -1]], [2, 1], [12, 9], [1, 3, 8], [5, 5, 5], False, dtype=dtype
    )
    assert kept == [[0.0, 2.0, -1, -1], [3.0, -1, -1, -1], [-1] * 4]
    assert (counts, first) == ([2, 1, 8], [9, 7, 5])  # another slot's stay


def test_an_idle_request_leaves_none(cuda_backend):
    kept, counts, _ = kept_pairs(cuda_backend, [[-1] * 3, [0, 1, 2]], [0, 3], [1, 9], [1, 3, 0], [0, 0, 0], False)
    assert kept[0] == [-1] * 4 and counts == [0, 3, 0]


def test_a_cycle_of_one_node_adds_its_pair(cuda_backend):
    kept, counts, first = kept_pairs(cuda_backend, [[0], [-1]], [1, 0], [7, 1], [2, 1, 1], [4, 5, 6], True, rows=1)
    assert kept == [[-1, -1, 0.0, -1], [-1] * 4, [-1] * 4]
    assert (counts, first) == ([3, 1, 1], [4, 5, 6])


def test_pairs_beyond_the_room_are_not_kept(cuda_backend):
    kept, counts, _ = kept_pairs(cuda_backend, [[0], [0]], [1, 1], [7, 7], [4, 3, 0], [0, 0, 0], True, rows=1)
    assert kept[0] == [-1] * 4 and kept[1] == [-1, -1, -1, 1.0] and counts[1] == 4
    nodes = [*range(6)]
    kept, counts, first = kept_pairs(cuda_backend, [nodes, nodes], [6, 6], [9, 9], [0, 0, 0], [0, 0, 0], False, rows=6)
    assert (kept[0], counts[0], first[0]) == ([0.0, 1.0, 2.0, 3.0], 4, 2)  # the first ones are


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_last_committed_state_is_kept_alone(cuda_backend, dtype):
    hidden = torch.arange(9.0)[:, None].expand(-1, 5).to(dtype).contiguous()
    accepted = Accepted.empty(3, 3, device=cuda_backend.device)
    accepted.path.copy_(torch.tensor([[0, 2, -1], [-1, -1, -1], [0, 1, 2]]))
    accepted.path_length.copy_(torch.tensor([2, 0, 1]))
    kept = cuda_backend.put(torch.full((4, 5), -1.0))
    start, known = put(cuda_backend, [0, 3, 6, 9], [0, 1, 0, 1])
    keep_last(cuda_backend.put(hidden), start, accepted, kept, known)
    assert kept.std(-1).max() == 0
    assert kept[:, 0].tolist() == [2.0, -1.0, 6.0, -1.0]  # an idle request's and another slot's stay
    assert known.tolist() == [1, 0, 1, 1]
