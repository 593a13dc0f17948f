"""Threads that fill masks while the target runs; the grammar engine computes without the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from specengine.constraints.base import Constraint
from specengine.draft_trees.tree import DraftTree

_workers: ThreadPoolExecutor


def _new_workers() -> None:
    global _workers
    _workers = ThreadPoolExecutor(thread_name_prefix="specengine-masks")  # starts threads when they are needed


_new_workers()
os.register_at_fork(after_in_child=_new_workers)  # a child has none of its parent's threads


def begin_fill(constraint: Constraint, tree: DraftTree, rows: np.ndarray) -> Future[None]:
    """Begins Constraint.fill() in another thread.  rows: int32 [nodes, W], to be left alone until it is done."""
    try:
        return _workers.submit(constraint.fill, tree, rows)
    except RuntimeError:  # once the main thread has ended, none can be started
        done: Future[None] = Future()
        constraint.fill(tree, rows)
        done.set_result(None)
        return done


def finish_fills(fills: Iterable[Future[None]]) -> None:
    """Waits for all fills, then raises the first error: no thread writes into the rows any more."""
    done = [*fills]
    wait(done)
    for fill in done:
        fill.result()
