"""All cases of `--kernels`: each kernel beside the same computation in PyTorch.

PyTorch gets the inputs that suit it best: contiguous caches instead of pages, its fastest data type, heads folded into
rows. Calls use several sets of weights, caches and logits in turn, together larger than a cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specengine.bench.kernels.cache_cases import attention_case, compact_case, rope_cache_case
from specengine.bench.kernels.case import Case
from specengine.bench.kernels.layer_cases import rms_norm_case, silu_mul_case
from specengine.bench.kernels.linear_cases import linear_cases
from specengine.bench.kernels.shapes import Kernels, Shapes
from specengine.bench.kernels.tree_cases import expand_case, select_case, verify_case
from specengine.types import SamplingParams


def cases(shapes: Shapes, device: torch.device, kernels: Kernels) -> Iterator[Case]:
    """Yields cases one by one, because their buffers are large."""
    for nodes in shapes.trees:
        for prefix in shapes.prefixes:
            yield attention_case(shapes, device, kernels, nodes, prefix)
    yield compact_case(shapes, device, kernels)
    yield expand_case(shapes, device)
    yield select_case(shapes, device)
    yield verify_case(shapes, device, SamplingParams())
    yield verify_case(shapes, device, SamplingParams(temperature=0.8, top_p=0.95))
    yield verify_case(shapes, device, SamplingParams(), masked=True)
    yield from linear_cases(shapes, device, kernels)
    for rows in (shapes.rows[0], shapes.rows[-1]):
        yield rms_norm_case(shapes, device, kernels, rows)
        yield silu_mul_case(shapes, device, kernels, rows)
        yield rope_cache_case(shapes, device, kernels, rows)
