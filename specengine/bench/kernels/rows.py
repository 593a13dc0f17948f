"""Time of a target pass by its number of rows, and speed of a linear layer of one row against memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

from specengine._C import MAX_NODES, PAGE_SIZE, PANEL
from specengine.bench.kernels.timers import medians, timer_for
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.models.transformer import Transformer
from specengine.ops.weight import Projection

PREFIX = 128  # cached tokens before the rows
_PASSES = 15


def time_rows(target: Transformer, counts: Sequence[int], prefix: int = PREFIX) -> list[dict[str, Any]]:
    """Returns median milliseconds of a pass over a chain, by its rows, and their ratio to a pass of one row.

    counts: numbers of rows; one row is always measured.  prefix: cached tokens before the chain.
    Raises ValueError for a count that no tree can have.
    """
    most = min(MAX_NODES, target.config.max_position - prefix)
    wrong = [count for count in counts if not 1 <= count <= most]
    if wrong:
        raise ValueError(f"rows: expected 1 to {most}, got {wrong[0]}")
    counts = sorted({1, *counts})
    tokens = [i % target.config.vocab_size for i in range(prefix + counts[-1])]
    chains = [DraftTree(tokens[prefix : prefix + n], range(-1, n - 1)) for n in counts]
    target.ensure_positions(len(tokens))
    target.tune()
    cache = target.new_cache(-(-len(tokens) // PAGE_SIZE), 1)
    pages = cache.allocate(len(tokens))
    for start in range(0, prefix, target.ops.prefill_rows):
        rows = TreeBatch.chains([tokens[start : min(prefix, start + target.ops.prefill_rows)]], target.device)
        target.hidden(rows, cache, cache.batch([pages], [start]))
    # As in cycles: cycles on the device serve all sampling parameters, so they store the logits.
    on_device = target.ops.on_device
    batch = cache.batch([pages], [prefix], final=False)
    trees = [TreeBatch.of([chain], target.device, masked=on_device) for chain in chains]
    timer = timer_for(target.device)
    timers = [timer([partial(target.forward, tree, cache, batch, greedy=not on_device)]) for tree in trees]
    ms = [1e3 * seconds for seconds in medians(timers, _PASSES)]
    found = zip(counts, ms, strict=True)
    return [{"rows": n, "prefix": prefix, "ms": each, "ratio": each / ms[0]} for n, each in found]


def time_linear(target: Transformer, mib: int = 256) -> list[dict[str, Any]]:
    """Returns bytes of weights per second that a linear layer of one row reads, and those of a plain sum.

    There is one entry per weight format of the target. Weights are larger than the caches. Speeds are medians.
    """
    columns = target.config.intermediate_size  # the longest row of the model keeps the output small
    x = torch.randn(1, columns, device=target.device)
    plain = torch.ones(mib << 18, device=target.device)
    timer = timer_for(target.device)
    speeds = []
    for form in sorted(target.formats):
        one = target.ops.empty_weight(PANEL, columns, form, target.device).data.nbytes
        weight = target.ops.empty_weight(PANEL * max(1, (mib << 20) // one), columns, form, target.device)
        weight.data.view(torch.uint8).fill_(1)  # maps the pages, and avoids NaN
        layer = Projection((weight,), None)
        ours, sums = medians([timer([partial(target.ops.linear, x, layer)]), timer([plain.sum])], _PASSES)
        speed, reading = weight.data.nbytes / ours, plain.nbytes / sums
        speeds.append({"format": form, "bytes_per_second": speed, "read_bytes_per_second": reading})
    return speeds


def rows_table(rows: Sequence[dict[str, Any]], linears: Sequence[dict[str, Any]]) -> Table:
    """Returns the results of `time_rows` and `time_linear` as a table."""
    read = ", ".join(
        f"{each['format']} {each['bytes_per_second'] / 1e9:.0f} of {each['read_bytes_per_second'] / 1e9:.0f} GB/s"
        for each in linears
    )
    caption = f"a linear layer of one row reads, of the speed of a plain sum: {read}"
    title = f"one target pass by rows, {rows[0]['prefix']} tokens cached"
    out = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("rows", "ms", "over one row"):
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(str(row["rows"]), f"{row['ms']:.2f}", f"{row['ratio']:.2f}x")
    return out
