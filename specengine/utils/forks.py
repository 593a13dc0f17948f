"""Refuses work in a forked child of a process that has loaded a model."""

from __future__ import annotations

import os

_loaded = False
_forked = False


def mark_loaded() -> None:
    """Notes that this process has the threads of a loaded model, which a fork does not copy."""
    global _loaded
    _loaded = True


def check_not_forked() -> None:
    """Raises RuntimeError in a child of a fork whose parent had loaded a model.

    PyTorch's OpenMP would wait there for threads that only the parent has, and a lock may have been held.
    """
    if _forked:
        raise RuntimeError(
            "this process was forked from one that had loaded a model, whose threads it lacks: start processes with "
            "multiprocessing.get_context('spawn') and load the model in each, or fork before the model is loaded"
        )


def _mark_child() -> None:
    global _forked
    _forked = _loaded


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_child)
