"""What rows cost: one target pass by the number of rows it verifies, and a linear layer of one row against memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table

from specengine._C import MAX_NODES, PANEL
from specengine.models.transformer import Transformer
from specengine.ops.weight import Linear
from specengine.tree import DraftTree, TreeBatch

PREFIX = 128  # tokens in the cache
_PASSES = 15


def time_rows(target: Transformer, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Median milliseconds of a pass over a chain of so many rows after 128 cached tokens, and over that of one row.

    One row is always measured. Raises ValueError for counts that no tree can have.
    """
    most = min(MAX_NODES, target.config.max_position - PREFIX)
    wrong = [count for count in counts if not 1 <= count <= most]
    if wrong:
        raise ValueError(f"rows: expected 1 to {most}, got {wrong[0]}")
    counts = sorted({1, *counts})
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


def time_linear(target: Transformer, mib: int = 256) -> list[dict[str, Any]]:
    """Bytes of weights per second that a linear layer of one row reads, and a plain sum of as much memory, in turns.

    One entry per format of the target's weights; each weight is larger than the caches. Medians.
    """
    columns = target.config.intermediate_size  # as long a row as the model has: the output stays small
    x, found = torch.randn(1, columns, device=target.device), []
    plain = torch.ones(mib << 18, device=target.device)
    for form in sorted(target.formats):
        one = target.ops.empty_weight(PANEL, columns, form, target.device).data.nbytes
        weight = target.ops.empty_weight(PANEL * max(1, (mib << 20) // one), columns, form, target.device)
        weight.data.view(torch.uint8).fill_(1)  # touched, and no special values
        layer = Linear((weight,), None)
        layer_seconds, plain_seconds = [], []
        for _ in range(_PASSES):
            for run, seconds in ((partial(target.ops.linear, x, layer), layer_seconds), (plain.sum, plain_seconds)):
                begin = time.perf_counter()
                run()
                if target.device.type == "cuda":
                    torch.cuda.synchronize(target.device)
                seconds.append(time.perf_counter() - begin)
        speed, reading = weight.data.nbytes / median(layer_seconds), plain.nbytes / median(plain_seconds)
        found.append({"format": form, "bytes_per_second": speed, "read_bytes_per_second": reading})
    return found


def rows_table(rows: Sequence[dict[str, Any]], linears: Sequence[dict[str, Any]]) -> Table:
    """The results of `time_rows` and `time_linear` for reading."""
    read = ", ".join(
        f"{each['format']} {each['bytes_per_second'] / 1e9:.0f} of {each['read_bytes_per_second'] / 1e9:.0f} GB/s"
        for each in linears
    )
    caption = f"a linear layer of one row reads, of what a plain sum reads: {read}"
    title = f"one target pass by rows, {PREFIX} tokens cached"
    out = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("rows", "ms", "over one row"):
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(str(row["rows"]), f"{row['ms']:.2f}", f"{row['ratio']:.2f}x")
    return out
