"""Perplexity of a model on one fixed text, in each dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from specengine._C import PAGE_SIZE
from specengine.draft_trees.tree import TreeBatch
from specengine.models.transformer import Transformer
from specengine.models.weights import DTYPES
from specengine.tensor_parallel.loading import load_model

TEXT = Path(__file__).parents[1] / "data" / "text.txt"
REFERENCE = "float32"
CONTEXT = 512
_PASS_ROWS = 64  # rows of a pass, which bound the logits in memory


def token_logprobs(target: Transformer, ids: Sequence[int], first: int = 1) -> torch.Tensor:
    """Returns the log-probability of each token from `first` on, float64 [len(ids) - first]."""
    target.ensure_positions(len(ids))
    kv = target.new_cache(-(-len(ids) // PAGE_SIZE), 1)
    pages = kv.allocate(len(ids))
    logprobs = []
    for start in range(0, len(ids) - 1, _PASS_ROWS):
        rows = ids[start : min(start + _PASS_ROWS, len(ids) - 1)]
        tree = TreeBatch.chains([rows], target.device)
        batch = kv.batch([pages], [start])
        known = max(0, first - 1 - start)  # rows before `first`, whose logits are not needed
        if known >= len(rows):
            target.hidden(tree, kv, batch)
            continue
        logits = target.forward(tree, kv, batch).scores[known:].to("cpu", torch.float64)
        tokens = torch.tensor(ids[start + known + 1 : start + len(rows) + 1])
        logprobs.append(torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0])
    kv.free(pages)
    return torch.cat(logprobs)


def perplexity(target: Transformer, ids: Sequence[int], context: int = CONTEXT) -> float:
    """Returns exp of the mean negative log-probability of all tokens but the first of each `context` tokens.

    Raises ValueError for fewer than two tokens.
    """
    context = min(context, target.config.max_position)
    if len(ids) < 2 or context < 2:
        raise ValueError(f"perplexity: expected at least two tokens, got {len(ids)}")
    chunks = (ids[begin : begin + context] for begin in range(0, len(ids), context))
    logprobs = torch.cat([token_logprobs(target, chunk) for chunk in chunks if len(chunk) > 1])
    return math.exp(-logprobs.mean().item())


def perplexities(model: str, *, device: str = "auto", dtype: str = "auto") -> list[dict[str, Any]]:
    """Returns weight bytes and perplexity of a model in float32 and in `dtype`, and their ratios to float32.

    dtype: `auto` for every dtype.
    A dtype that the model does not support gives a row with the reason.
    Raises ValueError for a model without a tokenizer.
    """
    names = list(dict.fromkeys([REFERENCE, *(DTYPES if dtype == "auto" else [dtype])]))
    text = TEXT.read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            loaded = load_model(model, device=device, dtype=name)
        except ValueError as error:
            if name == REFERENCE or dtype != "auto":
                raise
            rows.append({"dtype": name, "reason": str(error)})
            continue
        if loaded.tokenizer is None:
            raise ValueError(f"perplexity: {model} has no tokenizer to read the text with")
        measured = perplexity(loaded.target, loaded.tokenizer.encode(text))
        size = loaded.target.weight_bytes()
        del loaded  # free its memory before the next dtype is loaded
        first = rows[0] if rows else {"weight_bytes": size, "perplexity": measured}
        rows.append(
            {
                "dtype": name,
                "weight_bytes": size,
                "perplexity": measured,
                "ratio": measured / first["perplexity"],
                "bytes_ratio": size / first["weight_bytes"],
            }
        )
    return rows


def perplexity_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Returns the rows of `perplexities` as a table."""
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
