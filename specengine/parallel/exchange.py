"""What ranks tell each other in the midst of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed


class Exchange:
    """Gathers over gloo on this machine's loopback; a group of its own, so that the program may use torch.distributed
    for itself.

    store: a file that all ranks name.  patience: seconds to wait for another rank.
    Raises ConnectionError where a rank is gone or does not answer in time.
    """

    def __init__(self, store: str, rank: int, size: int, patience: float) -> None:
        gloo: Any = distributed.ProcessGroupGloo  # whose types torch does not tell
        limit = timedelta(seconds=patience)
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        where = distributed.FileStore(store, size)
        where.set_timeout(limit)
        try:
            self._group = gloo(where, rank, size, options)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """All ranks' x [M, widths[rank]] side by side, [M, sum of widths]."""
        rows, most = len(x), max(widths)
        if x.shape[1] < most:  # gloo takes equal sizes
            x = F.pad(x, (0, most - x.shape[1]))
        every = [torch.empty(rows, most) for _ in widths]
        try:
            self._group.allgather([every], [x]).wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        return torch.cat([part[:, :width] for part, width in zip(every, widths, strict=True)], dim=1)

    def close(self) -> None:
        """Before the interpreter ends: gloo's threads would abort it."""
        del self._group
