"""Pools of phrases with known contents."""

import random
from types import SimpleNamespace

import torch

from specengine._C import PhrasePool

TARGET = SimpleNamespace(final_norm=torch.ones(4), config=SimpleNamespace(vocab_size=20))
SHAPE = (2, 3, 50)


def filled(count=40, seed=1):
    pool, draw = PhrasePool(*SHAPE), random.Random(seed)
    for _ in range(count):
        pool.insert(draw.randrange(20), [draw.randrange(5), draw.randrange(5)])
    return pool
