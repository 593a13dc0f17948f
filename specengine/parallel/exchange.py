"""The sum over all ranks, in one order."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed


class Exchange:
    """What ranks on this machine tell each other, over gloo on its loopback; a group of its own, so that the program
    may use torch.distributed for itself.

    store: a file that all ranks name.  patience: seconds to wait for another rank.
    """

    def __init__(self, store: str, rank: int, size: int, patience: float) -> None:
        gloo, limit = distributed.ProcessGroupGloo, timedelta(seconds=patience)
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        where = distributed.FileStore(store, size)
        where.set_timeout(limit)
        self._size = size
        try:
            self._group = gloo(where, rank, size, options)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x [M, C].

        Everyone gets all summands and adds them in the order of the ranks: an all-reduce may add in an order that
        depends on the place of a number among all, and a row's bits would depend on the rows beside it.
        Raises ConnectionError where a rank is gone or does not answer in time.
        """
        summands = [torch.empty_like(x) for _ in range(self._size)]
        try:
            self._group.allgather([summands], [x]).wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        total = summands[0].add_(summands[1])
        for summand in summands[2:]:
            total.add_(summand)
        return total

    def close(self) -> None:
        """Before the interpreter ends: gloo's threads would abort it."""
        del self._group
