"""What a dtype costs in quality: the model's perplexity on one fixed text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from specengine.models.loading import load_model
from specengine.models.transformer import Transformer
from specengine.models.weights import DTYPES
from specengine.tree import TreeBatch

TEXT = Path(__file__).with_name("text.txt")
REFERENCE = "float32"
CONTEXT = 512
_PASS_ROWS = 64  # logits of so many rows at a time


def perplexity(target: Transformer, ids: Sequence[int], context: int = CONTEXT) -> float:
    """exp of the mean negative log-probability of every token but the first of each `context` tokens.

    Raises ValueError for fewer than two tokens.
    """
    context = min(context, target.config.max_position)
    if len(ids) < 2 or context < 2:
        raise ValueError(f"perplexity: expected at least two tokens, got {len(ids)}")
    target.ensure_positions(context)
    cache = target.new_cache()
    pages = cache.allocate(context)
    nats, count = 0.0, 0
    for begin in range(0, len(ids), context):
        chunk = ids[begin : begin + context]
        for start in range(0, len(chunk) - 1, _PASS_ROWS):
            rows = chunk[start : min(start + _PASS_ROWS, len(chunk) - 1)]
            told = torch.tensor(chunk[start + 1 : start + 1 + len(rows)])
            tree = TreeBatch.chains([rows], target.device)
            logits = target.forward(tree, cache, cache.batch([pages], [start])).scores
            logprobs = torch.log_softmax(logits.to("cpu", torch.float64), dim=-1)
            nats -= logprobs.gather(1, told[:, None]).sum().item()
            count += len(rows)
    cache.free(pages)
    return math.exp(nats / count)


def perplexities(model: str, *, device: str = "auto", dtype: str = "auto") -> list[dict[str, Any]]:
    """Weight bytes and perplexity of a model in every dtype (`auto`: all there are), each over that of float32.

    A dtype that this model cannot have gives a row with the reason. Raises ValueError for a model without tokenizer.
    """
    names = list(dict.fromkeys([REFERENCE, *(DTYPES if dtype == "auto" else [dtype])]))
    text, rows = TEXT.read_text(encoding="utf-8"), []
    for name in names:
        try:
            loaded = load_model(model, device=device, dtype=name)
        except ValueError as error:
            if name == REFERENCE or dtype != "auto":
                raise
            rows.append({"dtype": name, "reason": str(error)})
            continue
        if loaded.tokenizer is None:
            raise ValueError(f"perplexity: {model} has no tokenizer, so no text can be put to it")
        found = perplexity(loaded.target, loaded.tokenizer.encode(text))
        size = loaded.target.weight_bytes()
        del loaded  # before the next one takes its memory
        first = rows[0] if rows else {"weight_bytes": size, "perplexity": found}
        rows.append(
            {
                "dtype": name,
                "weight_bytes": size,
                "perplexity": found,
                "ratio": found / first["perplexity"],
                "bytes_ratio": size / first["weight_bytes"],
            }
        )
    return rows


def perplexity_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The rows of `perplexities` for reading."""
    out = Table(title=title, title_justify="left")
    out.add_column("dtype")
    for name in ("weights, MB", f"over {REFERENCE}", "perplexity", f"over {REFERENCE}"):
        out.add_column(name, justify="right")
    for row in rows:
        if "reason" in row:
            out.add_row(row["dtype"], row["reason"])
            continue
        out.add_row(
            row["dtype"],
            f"{row['weight_bytes'] / 1e6:.1f}",
            f"{row['bytes_ratio']:.3f}x",
            f"{row['perplexity']:.4f}",
            f"{row['ratio']:.4f}x",
        )
    return out
