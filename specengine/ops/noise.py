"""The keyed noise of sampling, in numpy: the reference of csrc/base/philox.h and of the two-level draw.

Every (seed, position) fixes one Gumbel number per block of 64 tokens and one per token. The drawn token is
argmax(log weight + noise): first over blocks, by their total weight, then inside the block. By the chain rule the draw
is exact, and it needs V / 64 + 64 numbers instead of V.
"""

from __future__ import annotations

import numpy as np
import torch

from specengine._C import NOISE_BLOCK

TARGET_STREAMS = BLOCK_STREAM, TOKEN_STREAM = 0, 1
DRAFT_STREAMS = 3, 4  # of blocks and tokens


def philox4x32(key: int, counter: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., SC'11) of counters uint32 [n, 4] -> uint32 [n, 4]."""
    c = counter.astype(np.uint64)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        c = np.stack(
            [
                b >> np.uint64(32) ^ c[:, 1] ^ np.uint64(k0),
                b & mask,
                a >> np.uint64(32) ^ c[:, 3] ^ np.uint64(k1),
                a & mask,
            ],
            axis=1,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c.astype(np.uint32)


def gumbel(seed: int, position: int, index: np.ndarray, stream: int, salt: int = 0) -> np.ndarray:
    """Standard Gumbel numbers, float64, one per entry of index."""
    counter = np.zeros((len(index), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2], counter[:, 3] = index >> 2, position, stream, salt
    bits = philox4x32(seed, counter)[np.arange(len(index)), index & 3]
    return -np.log(-np.log((bits + 0.5) * 2.0**-32))


def draw(
    probs: torch.Tensor, *, seed: int, position: int, streams: tuple[int, int] = TARGET_STREAMS, salt: int = 0
) -> int:
    """The token that (seed, position) draws from weights float64 [V]; the weights need not sum to 1."""
    weights = probs.double().numpy()
    blocks = -(-len(weights) // NOISE_BLOCK)
    padded = np.zeros(blocks * NOISE_BLOCK)
    padded[: len(weights)] = weights
    with np.errstate(divide="ignore"):
        totals = np.log(padded.reshape(blocks, NOISE_BLOCK).sum(axis=1))
        block = int(np.argmax(totals + gumbel(seed, position, np.arange(blocks), streams[0], salt)))
        tokens = np.arange(block * NOISE_BLOCK, min((block + 1) * NOISE_BLOCK, len(weights)))
        return int(tokens[np.argmax(np.log(weights[tokens]) + gumbel(seed, position, tokens, streams[1], salt))])
