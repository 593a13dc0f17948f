"""What the kernels do to memory at given sizes: recorded counts of the simulator, and what follows from them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from specengine._C import LINEAR_VARIANTS
from specengine.bench.kernels.shapes import LLAMA_8B

RECORD = Path(__file__).resolve().parents[1] / "data" / "kernel_counts.json.gz"
VARIANTS = range(1, len(LINEAR_VARIANTS) + 1)
CODED = ("int4_128_float16", "e4m3")  # formats of weights in codes that are counted, by place
NODES = (1, 8, 60, 128)  # rows of a request in a pass
WITH_DRAFTER = (1, 8, 16, 60, 128)
BATCH = 64
CHAIN = 7  # levels that EAGLE-3 drafts, of a vocabulary of its own
EAGLE_VOCABULARY = 32000
VOCABULARY = LLAMA_8B.vocab
EXPERTS, EXPERTS_PER_ROW = 128, 8  # of Qwen3-30B-A3B
EXPERT_ROWS = (1, 4, 16)  # of its passes: plain, a chain of three, a tree of sixteen nodes
# Verification rules that are counted, by place, at trees of RULE_NODES nodes of one request. `path` is 0 where five
# first children are accepted, and 1 where the root refuses both children. `noted` is 0 where one block does it all.
RULES = (
    "rejection",
    "typical:epsilon=0.2,delta=0.4",
    "margin:theta=0.5,mode=strict",
    "margin:theta=0.5,mode=lossless-base",
    "margin:theta=0.5,mode=reference",
    "bild:alpha=0.5",
    "cascade:opt,alpha=0.2",
    "cascade:token-v3,alpha=0.5",
    "traversal",
)
RULE_NODES = 60
FROM_LEAVES = RULES.index("traversal")  # it would refuse every path to the root: not counted
_OF_RULES = {"nodes": (RULE_NODES,), "batch": (1,), "vocabulary": (VOCABULARY,), "noted": (0, 1)}
# Sizes that are counted; rows are those of all requests. Along the axes of SCALED, two sizes give all others.
SAMPLED: list[tuple[str, Mapping[str, Sequence[int]]]] = [
    ("linear", {"rows": (1, 8, 16, 60, 64), "n": (64, 128), "c": (4096, 5120), "variant": VARIANTS}),
    ("coded_linear", {"rows": (1, 8, 16), "n": (64, 128), "c": (4096, 5120), "format": range(len(CODED))}),
    *((op, {"rows": rows}) for op in ("rms_norm", "silu_mul", "gather_rows") for rows in (WITH_DRAFTER, (64, 128))),
    ("rope_cache", {"nodes": WITH_DRAFTER, "batch": (1,)}),
    ("rope_cache", {"nodes": NODES, "batch": (BATCH,)}),
    ("tree_attention", {"nodes": WITH_DRAFTER, "batch": (1,), "prefix": (2048,)}),
    ("tree_attention", {"nodes": NODES, "batch": (BATCH,), "prefix": (128, 192)}),
    *((op, {"nodes": NODES, "batch": (batch,)}) for op in ("compact_kv", "commit_tokens") for batch in (1, BATCH)),
    ("verify_tree", {"nodes": NODES, "batch": (1,), "vocabulary": (VOCABULARY,)}),
    ("verify_tree", {"nodes": (1,), "batch": (BATCH,), "vocabulary": (VOCABULARY,)}),
    ("verify_tree", {"nodes": NODES[1:], "batch": (BATCH,), "vocabulary": (1280, 2304)}),
    ("verify_rule", {**_OF_RULES, "rule": range(len(RULES)), "path": (0,)}),
    ("verify_rule", {**_OF_RULES, "rule": range(FROM_LEAVES), "path": (1,)}),
    *(("draft_lookup", {"nodes": (1,), "batch": (batch,)}) for batch in (1, BATCH)),
    ("expand_level", {"vocabulary": (EAGLE_VOCABULARY,)}),
    ("select_nodes", {"nodes": (CHAIN + 1,)}),
    *((op, {"rows": EXPERT_ROWS}) for op in ("route_rows", "group_pairs", "combine_experts")),
    ("expert_linear", {"experts": (2, 4), "n": (64, 128), "c": (2048, 3072)}),
]
SCALED = {
    "linear": ("n", "c"),
    "coded_linear": ("n", "c"),
    "expert_linear": ("experts", "n", "c"),
    "rms_norm": ("rows",),
    "silu_mul": ("rows",),
    "gather_rows": ("rows",),
    "tree_attention": ("prefix",),
    "verify_tree": ("vocabulary",),
}
Size = dict[str, int]


@dataclass(frozen=True)
class Traffic:
    """Counts accesses to one tensor on one path.

    requests: of warps.  bytes: that threads asked for.  sectors: of 32 bytes, distinct within each request.
    block_sectors: distinct within each block.  unique_bytes: distinct within the launch.
    """

    requests: int
    bytes: int
    sectors: int
    block_sectors: int
    unique_bytes: int


@dataclass(frozen=True)
class Launch:
    """Counts what a launch does.

    registers: of a thread.  shared_bytes: of a block.  products: matrix products m16n8k16.
    copies: of 16 bytes that a thread has under way at once.
    wavefronts, least_wavefronts: turns of shared memory, and turns without bank conflicts.
    tensors: by name and path: load, uncached (past L1), store, atomic.
    rounds: waits of one thread for loads, by the largest tensor it waits for.  chain: loads whose addresses depend on
    each other.
    """

    op: str
    kernel: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    products: int
    copies: int
    requests: int
    wavefronts: int
    least_wavefronts: int
    tensors: dict[str, dict[str, Traffic]]
    rounds: dict[str, int]
    chain: int

    def traffic(self, *paths: str) -> list[tuple[str, Traffic]]:
        """Returns the tensors and their traffic on some paths, or on all."""
        return [(name, t) for name, by in self.tensors.items() for path, t in by.items() if not paths or path in paths]


def launches(op: str, size: Size) -> list[Launch]:
    """Returns the launches of an op at a size, scaled from counted sizes where it is not counted itself.

    Raises ValueError where the record has no sizes to scale from.
    """
    record = _record()
    if (found := record["samples"].get(_key(op, size))) is None:
        found = _scaled(op, size, record["samples"])
    return [_launch(each, record["kernels"]) for each in found]


def between(corners: dict[tuple[int, ...], Any], at: tuple[int, ...]) -> Any:
    """Returns what is linear in every axis and has the corners' values at two places of each axis.

    Values are numbers, or dictionaries and lists of them. Raises ValueError where they differ in anything else.
    """
    first = next(iter(corners.values()))
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in corners.values()):
            raise ValueError("counts: the sizes to scale from touch different tensors")
        return {key: between({place: value[key] for place, value in corners.items()}, at) for key in first}
    if isinstance(first, list):
        if any(len(value) != len(first) for value in corners.values()):
            raise ValueError("counts: the sizes to scale from have different launches")
        return [between({place: value[i] for place, value in corners.items()}, at) for i in range(len(first))]
    if isinstance(first, str):
        if any(value != first for value in corners.values()):
            raise ValueError("counts: the sizes to scale from run different kernels")
        return first
    axes = [sorted({place[axis] for place in corners}) for axis in range(len(at))]
    total = 0.0
    for place, value in corners.items():
        share = 1.0
        for axis, (low, high) in enumerate(axes):
            along = (at[axis] - low) / (high - low)
            share *= along if place[axis] == high else 1 - along
        total += share * value
    return round(total)


def _scaled(op: str, size: Size, samples: dict[Any, Any]) -> Any:
    axes = SCALED.get(op, ())
    for sampled, counted in SAMPLED:
        fixed = {axis: value for axis, value in size.items() if axis not in axes}
        if sampled != op or counted.keys() != size.keys() or any(fixed[axis] not in counted[axis] for axis in fixed):
            continue
        if all(len(counted[axis]) == 2 for axis in axes):
            places = list(product(*(counted[axis] for axis in axes)))
            keys = [_key(op, {**size, **dict(zip(axes, at, strict=True))}) for at in places]
            if all(key in samples for key in keys):
                corners = {at: samples[key] for at, key in zip(places, keys, strict=True)}
                return between(corners, tuple(size[axis] for axis in axes))
    raise ValueError(f"counts: {op} is not counted at {size}, nor at sizes to scale from")


def _launch(counted: dict[str, Any], kernels: dict[str, Any]) -> Launch:
    about = kernels[counted["kernel"]]
    return Launch(
        op=counted["op"],
        kernel=counted["kernel"],
        blocks=counted["blocks"],
        threads=counted["threads"],
        registers=about["registers"],
        shared_bytes=counted["dynamic_shared"] + counted["static_shared"],
        products=counted["products"],
        copies=counted["copies"],
        requests=counted["shared"]["requests"],
        wavefronts=counted["shared"]["wavefronts"],
        least_wavefronts=counted["shared"]["least_wavefronts"],
        tensors={
            name: {path: Traffic(**traffic) for path, traffic in by.items()} for name, by in counted["tensors"].items()
        },
        rounds=counted["rounds"],
        chain=about["chain"],
    )


def _key(op: str, size: Size) -> tuple[str, tuple[tuple[str, int], ...]]:
    return op, tuple(sorted(size.items()))


def recorded() -> dict[str, Any]:
    """Reads the recorded counts: `kernels` by name and `samples`."""
    return json.loads(gzip.decompress(RECORD.read_bytes()))


@cache
def _record() -> dict[str, Any]:
    data = recorded()
    samples = {_key(each["op"], each["size"]): each["launches"] for each in data["samples"]}
    return {"kernels": data["kernels"], "samples": samples}
