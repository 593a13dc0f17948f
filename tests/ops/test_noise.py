"""The keyed noise: published Philox vectors, the law of the numbers, the C++ draw against the reference."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from specengine.draft_trees.tree import TreeBatch
from specengine.ops import noise
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.verify_tree import verify_tree
from specengine.types import SamplingParams
from tests.ops.cases import randn

KNOWN_ANSWERS = [  # Random123, kat_vectors: philox4x32 10
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x299F31D0_A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("key, counter, expected", KNOWN_ANSWERS)
def test_philox_gives_the_published_numbers(key, counter, expected):
    # Twice in one call: entries of a batch must not influence each other.
    out = noise.philox4x32(key, np.array([counter, (1, 2, 3, 4), counter], dtype=np.uint32))
    assert tuple(out[0]) == tuple(out[2]) == expected
    assert tuple(out[1]) != expected


def draw_natively(logits: torch.Tensor, seeds: list[int], positions: list[int]) -> list[int]:
    """The tokens verify_tree draws at root-only trees, one request per (seed, position), all with the same logits."""
    count = len(seeds)
    params = SamplingTable.of([SamplingParams(temperature=1.0)] * count, seeds)
    length = torch.tensor(positions, dtype=torch.int32)
    history = TokenHistory(torch.zeros(count, max(positions), dtype=torch.int32), length, torch.zeros_like(length))
    tree = TreeBatch.chains([[0]] * count, torch.device("cpu"))
    return verify_tree(logits.expand(count, -1).contiguous(), tree, params, history).bonus.tolist()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 63, 64, 65, 128, 130, 1000])
def test_the_native_draw_is_the_reference_draw(vocab):
    logits = 2 * randn(vocab, seed=vocab)
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, *range(100, 240)]
    positions = [1 + 37 * i % 500 for i in range(len(seeds))]
    weights = logits.double().softmax(0)
    expected = [noise.draw(weights, seed=s, position=p) for s, p in zip(seeds, positions, strict=True)]
    assert draw_natively(logits, seeds, positions) == expected
    assert vocab < 7 or len(set(expected)) > 3


def test_every_part_of_the_key_changes_the_numbers():
    index = np.arange(8)
    base = noise.gumbel(5, 6, index, noise.TOKEN_STREAM)
    for other in (
        noise.gumbel(4, 6, index, noise.TOKEN_STREAM),
        noise.gumbel(5 + 2**32, 6, index, noise.TOKEN_STREAM),
        noise.gumbel(5, 7, index, noise.TOKEN_STREAM),
        noise.gumbel(5, 6, index, noise.BLOCK_STREAM),
        noise.gumbel(5, 6, index + 8, noise.TOKEN_STREAM),
    ):
        assert not np.isin(other, base).any()


def test_the_numbers_are_gumbel_distributed():
    numbers = np.concatenate([noise.gumbel(s, 3, np.arange(1000), noise.TOKEN_STREAM) for s in range(20)])
    assert np.isfinite(numbers).all()
    assert stats.kstest(numbers, "gumbel_r").pvalue > 1e-3
    assert stats.kstest(numbers, "norm").pvalue < 1e-9  # the test can tell


def test_a_draw_with_one_possible_token_takes_it():
    weights = torch.zeros(200, dtype=torch.float64)
    weights[137] = 1e-300
    assert {noise.draw(weights, seed=s, position=1) for s in range(50)} == {137}


def test_weights_need_not_sum_to_one():
    weights = randn(100).double().exp()
    for seed in range(50):
        scaled = noise.draw(weights * math.pi, seed=seed, position=2)
        assert scaled == noise.draw(weights / weights.sum(), seed=seed, position=2)
