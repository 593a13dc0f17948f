"""Threads that fill masks while the target runs; the grammar engine computes without the interpreter's lock."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from specengine.constraints.constraint import Constraint
from specengine.draft_trees.tree import DraftTree

_workers = ThreadPoolExecutor(thread_name_prefix="specengine-masks")  # starts threads when they are needed


def begin_fill(constraint: Constraint, tree: DraftTree, rows: np.ndarray) -> Future[None]:
    """Begins Constraint.fill() in another thread.  rows: int32 [nodes, W], to be left alone until it is done."""
    return _workers.submit(constraint.fill, tree, rows)
