"""Masks that other threads fill: also in a forked process, and once the main thread has ended."""

import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from specengine import SamplingParams
from specengine.constraints import background
from specengine.constraints.background import begin_fill, finish_fills
from specengine.draft_trees.tree import DraftTree
from tests.constraints.masks import WORDS, tokens_of
from tests.constraints.vocabulary import grammars


def filled() -> list[int]:
    rows = np.zeros((1, WORDS), dtype=np.int32)
    constraint = grammars().constraint(SamplingParams(regex="[ab]c"))
    finish_fills([begin_fill(constraint, DraftTree([0], [-1]), rows)])
    return tokens_of(rows[0])


def test_a_forked_child_fills_masks_in_threads_of_its_own():
    assert filled() == [97, 98]  # the parent's pool has a thread, which the child has not
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if filled() == [97, 98] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_masks_are_filled_once_no_thread_can_be_started(monkeypatch):
    """As in a thread that outlives the main one."""
    ended = ThreadPoolExecutor()
    ended.shutdown()
    monkeypatch.setattr(background, "_workers", ended)
    assert filled() == [97, 98]
