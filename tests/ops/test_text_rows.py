"""The tokens that GLIDE has not cached, between captured cycles: how they are laid out, and what each of them sees."""

import pytest
import torch

from specengine.ops.growth.text_rows import text_rows
from specengine.ops.sampling_table import TokenHistory
from tests.ops.cases import ancestor_bits, chain

BLOCK = 5


def laid_out(backend, texts, active, first, rows, unread=0, room=80, **masks):
    """Returns the rows, and `first` as it is then; pages of request b are 10 b + 0, 1 and 2."""
    text = torch.full((len(texts), room), 77, dtype=torch.int32)
    for b, own in enumerate(texts):
        text[b, : len(own)] = torch.tensor(own)
    pages = 10 * torch.arange(len(texts), dtype=torch.int32)[:, None] + torch.arange(3, dtype=torch.int32)
    columns = [[len(own) for own in texts], active, first, [*range(0, len(texts) * rows + 1, rows)]]
    length, runs, begin, start = (backend.put(torch.tensor(each, dtype=torch.int32)) for each in columns)
    history = TokenHistory(backend.put(text), length, length)
    return text_rows(history, runs, backend.put(pages), begin, start, rows, unread, BLOCK, **masks), begin.tolist()


def keys_of(position, verified):
    """Returns how many of the target's keys a token sees, by the words of rows.py."""
    if position >= verified:
        return verified
    return position + 1 if position < BLOCK else position // BLOCK * BLOCK


@pytest.mark.parametrize("rows", [4, 33])
def test_unread_tokens_are_chains_and_count_as_read_but_for_the_root(cuda_backend, rows):
    texts = [[*range(10, 16)], [*range(20, 60)], [5], [7, 8, 9]]
    active, first = [1, 1, 1, 0], [3, 40 - rows, 0, 1]
    found, after = laid_out(cuda_backend, texts, active, first, rows)
    counts = [3, rows, 0, 0]
    for b, (text, count, begin) in enumerate(zip(texts, counts, first, strict=True)):
        own, padding = slice(b * rows, (b + 1) * rows), [-1] * (rows - count)
        assert found.rows.tokens[own].tolist() == [*text[begin : begin + count], *padding]
        assert found.rows.parents[own].tolist() == [*range(-1, count - 1), *padding]
        assert found.rows.depths[own].tolist() == [*range(count), *padding]
        bits = torch.zeros(rows, -(-rows // 32), dtype=torch.int32)
        if count:
            bits[:count] = ancestor_bits([chain(count)], bits.shape[1])
        assert found.rows.ancestors[own].cpu().equal(bits)
        keys = [keys_of(begin + i, len(text) - 1) for i in range(count)]
        assert found.seen.lengths[own].tolist() == [each - 1 for each in keys] + [0] * (rows - count)
        assert found.seen.ancestors[own].flatten().tolist() == [1] * count + [0] * (rows - count)
        assert found.seen.block_table[own].tolist() == [[10 * b, 10 * b + 1, 10 * b + 2]] * rows
    assert found.last.tolist() == [2, 2 * rows - 1, 2 * rows, 3 * rows]
    assert found.roots.tolist() == [[15], [59], [5], [9]]
    assert found.running.tolist() == [1, 1, 0, 0]
    assert found.first.tolist() == first
    assert found.root_positions.tolist() == [5, 39, 0, 2]
    assert found.last_seen.tolist() == [4, 38, 0, 1]
    assert after == [5, 39, 0, 1]  # those that run


def test_the_root_may_be_left_out(cuda_backend):
    found, after = laid_out(cuda_backend, [[1, 2, 3, 4], [1, 2]], [1, 1], [1, 1], 3, unread=1)
    assert found.rows.tokens.tolist() == [2, 3, -1, -1, -1, -1]
    assert found.last.tolist() == [1, 3] and after == [3, 1]


def test_masks_lie_behind_the_last_token_of_requests_that_run(cuda_backend):
    texts = [[1, 2, 3, 4], [5, 6], [7, 8]]
    found, after = laid_out(cuda_backend, texts, [1, 1, 0], [2, 1, 0], 5, masks=2, mask_token=99)
    assert found.rows.tokens.tolist() == [3, 4, 99, 99, -1, 6, 99, 99, -1, -1, *[-1] * 5]
    assert found.rows.depths.tolist() == [0, 1, 2, 3, -1, 0, 1, 2, -1, -1, *[-1] * 5]
    bits = torch.zeros(15, 1, dtype=torch.int32)
    bits[:4], bits[5:8] = ancestor_bits([chain(4)], 1), ancestor_bits([chain(3)], 1)
    assert found.rows.ancestors.cpu().equal(bits)
    assert found.last.tolist() == [1, 2, 3, 5, 6, 7, 10, 11, 12] and after == [3, 1, 0]
    narrow, _ = laid_out(cuda_backend, texts[:1], [1], [0], 5, masks=3, mask_token=9)
    assert narrow.rows.tokens.tolist() == [1, 2, 3, 4, 9]
    assert narrow.last.tolist() == [3, 4, 4, 4]  # no mask is missing: there is no room for it


def test_sizes_that_do_not_fit_are_refused(cuda_backend):
    with pytest.raises(ValueError, match=r"^unread: expected 0 or more tokens, got -1"):
        laid_out(cuda_backend, [[1, 2]], [1], [0], 3, unread=-1)
    with pytest.raises(ValueError, match=r"^masks: expected 0 or more, of a token from 0, got -1, 0"):
        laid_out(cuda_backend, [[1, 2]], [1], [0], 3, masks=-1)
    with pytest.raises(ValueError, match=r"^rows.tokens: 300 rows per request, at most"):
        laid_out(cuda_backend, [[1, 2]], [1], [0], 300)
