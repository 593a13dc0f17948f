"""What rows cost: one target pass by the number of rows it verifies, and a linear layer of one row against memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

from specengine._C import MAX_NODES, PANEL
from specengine.bench.kernels.timers import medians, timer_for
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.models.transformer import Transformer
from specengine.ops.weight import Projection

PREFIX = 128  # tokens in the cache
_PASSES = 15


def time_rows(target: Transformer, counts: Sequence[int], prefix: int = PREFIX) -> list[dict[str, Any]]:
    """Median milliseconds of a pass over a chain of so many rows after `prefix` tokens, and over that of one row.

    One row is always measured. Raises ValueError for counts that no tree can have.
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
    cache = target.new_cache()
    pages = cache.allocate(len(tokens))
    for start in range(0, prefix, target.ops.prefill_rows):
        rows = TreeBatch.chains([tokens[start : min(prefix, start + target.ops.prefill_rows)]], target.device)
        target.hidden(rows, cache, cache.batch([pages], [start]))
    # As cycles have it: on the device they serve all parameters, so they store the logits.
    resident, batch = target.ops.resident, cache.batch([pages], [prefix])
    trees = [TreeBatch.of([chain], target.device, masked=resident) for chain in chains]
    timer = timer_for(target.device)
    timers = [timer([partial(target.forward, tree, cache, batch, greedy=not resident)]) for tree in trees]
    ms = [1e3 * seconds for seconds in medians(timers, _PASSES)]
    found = zip(counts, ms, strict=True)
    return [{"rows": n, "prefix": prefix, "ms": each, "ratio": each / ms[0]} for n, each in found]


def time_linear(target: Transformer, mib: int = 256) -> list[dict[str, Any]]:
    """Bytes of weights per second that a linear layer of one row reads, and a plain sum of as much memory, in turns.

    One entry per format of the target's weights; each weight is larger than the caches. Medians.
    """
    columns = target.config.intermediate_size  # as long a row as the model has: the output stays small
    x, found = torch.randn(1, columns, device=target.device), []
    plain, timer = torch.ones(mib << 18, device=target.device), timer_for(target.device)
    for form in sorted(target.formats):
        one = target.ops.empty_weight(PANEL, columns, form, target.device).data.nbytes
        weight = target.ops.empty_weight(PANEL * max(1, (mib << 20) // one), columns, form, target.device)
        weight.data.view(torch.uint8).fill_(1)  # touched, and no special values
        layer = Projection((weight,), None)
        ours, sums = medians([timer([partial(target.ops.linear, x, layer)]), timer([plain.sum])], _PASSES)
        speed, reading = weight.data.nbytes / ours, plain.nbytes / sums
        found.append({"format": form, "bytes_per_second": speed, "read_bytes_per_second": reading})
    return found


def rows_table(rows: Sequence[dict[str, Any]], linears: Sequence[dict[str, Any]]) -> Table:
    """The results of `time_rows` and `time_linear` for reading."""
    read = ", ".join(
        f"{each['format']} {each['bytes_per_second'] / 1e9:.0f} of {each['read_bytes_per_second'] / 1e9:.0f} GB/s"
        for each in linears
    )
    caption = f"a linear layer of one row reads, of what a plain sum reads: {read}"
    title = f"one target pass by rows, {rows[0]['prefix']} tokens cached"
    out = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("rows", "ms", "over one row"):
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(str(row["rows"]), f"{row['ms']:.2f}", f"{row['ratio']:.2f}x")
    return out
