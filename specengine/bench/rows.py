"""What more rows cost: one target pass by the number of rows it verifies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from rich.table import Table

from specengine.models.transformer import Transformer
from specengine.tree import DraftTree, TreeBatch

PREFIX = 128  # tokens in the cache
_PASSES = 15


def time_rows(target: Transformer, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Median milliseconds of a pass over a chain of so many rows after 128 cached tokens, and over that of one row.

    One row is always measured. Raises ValueError for counts that no tree can have.
    """
    counts = sorted({1, *counts})
    if counts[0] < 1 or PREFIX + counts[-1] > target.config.max_position:
        raise ValueError(f"rows: expected 1 to {target.config.max_position - PREFIX}, got {counts}")
    tokens = [i % target.config.vocab_size for i in range(PREFIX + counts[-1])]
    trees = [TreeBatch.of([DraftTree(tokens[PREFIX : PREFIX + n], range(-1, n - 1))], target.device) for n in counts]
    target.ensure_positions(len(tokens))
    cache = target.new_cache()
    pages = cache.allocate(len(tokens))
    target.hidden(TreeBatch.chains([tokens[:PREFIX]], target.device), cache, cache.batch([pages], [0]))
    batch = cache.batch([pages], [PREFIX])
    seconds: list[list[float]] = [[] for _ in counts]
    for turn in range(_PASSES + 1):
        for step in range(len(counts)):
            position = (turn + step) % len(counts)
            begin = time.perf_counter()
            target.forward(trees[position], cache, batch, greedy=True)
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            if turn:  # the first is a warm-up
                seconds[position].append(time.perf_counter() - begin)
    ms = [1e3 * median(spent) for spent in seconds]
    return [{"rows": n, "ms": each, "ratio": each / ms[0]} for n, each in zip(counts, ms, strict=True)]


def rows_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of `time_rows` for reading."""
    out = Table(title=f"one target pass by rows, {PREFIX} tokens cached", title_justify="left")
    for name in ("rows", "ms", "over one row"):
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(str(row["rows"]), f"{row['ms']:.2f}", f"{row['ratio']:.2f}x")
    return out
