"""Records what each kernel of a pass does to memory: `python -m tests.simulator.counts`.

Runs the kernels on the simulator with its counters on, at shapes of Llama-3.1-8B or at smaller ones from which
specengine/bench/gpu_model scales, and writes specengine/bench/data/kernel_counts.json.gz. Chains of loads need nvcc.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from specengine import ops
from specengine._C import PAGE_SIZE, KVCacheView
from specengine.bench.gpu_model.counts import CHAIN, CODED, EXPERTS, EXPERTS_PER_ROW, RECORD, RULES, SAMPLED
from specengine.bench.kernels.case import binary_tree, int_tensor
from specengine.bench.kernels.shapes import LLAMA_8B, QWEN3_30B_A3B
from specengine.draft_trees.shapes import Beam
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.ops.coded.weight import FORMS, empty_weight
from specengine.ops.commit_tokens import Limits, commit_tokens, record_width
from specengine.ops.draft_lookup import draft_lookup as lookup
from specengine.ops.experts import moe
from specengine.ops.growth.growing_trees import GrowingTrees, Logits
from specengine.ops.growth.growth_plan import GrowthPlan
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.select_nodes import SelectedTrees, select_nodes
from specengine.ops.verify_tree import Accepted, VerifyWorkspace
from specengine.rules import parse_rule
from specengine.types import SamplingParams
from tests.simulator.load_chains import chains, short

CPU = torch.device("cpu")
MULTIPROCESSORS = 132  # kernels choose their splits by them
PTXAS = Path(__file__).resolve().parents[2] / "bench" / "results" / "ptxas.json"
SHAPES, MIXTURE = LLAMA_8B, QWEN3_30B_A3B
HALF = torch.bfloat16


def linear(core: ModuleType, rows: int, n: int, c: int, variant: int) -> None:
    x, weight = torch.zeros(rows, c, dtype=HALF), torch.zeros(n, c, dtype=HALF)
    core.linear(x, weight, None, torch.empty(rows, n), 0, n, variant, None)


def coded_linear(core: ModuleType, rows: int, n: int, c: int, format: int) -> None:
    x, weight = torch.zeros(rows, c, dtype=HALF), empty_weight(n, c, CODED[format], CPU)
    core.coded_linear(x, weight.data, FORMS[weight.format], None, torch.empty(rows, n), 0, n)


def route_rows(core: ModuleType, rows: int) -> None:
    x, router = torch.zeros(rows, MIXTURE.hidden), torch.zeros(EXPERTS, MIXTURE.hidden, dtype=HALF)
    chosen, weights = int_tensor([[0] * EXPERTS_PER_ROW] * rows, CPU), torch.empty(rows, EXPERTS_PER_ROW)
    core.route_rows(x, router, None, None, torch.empty(rows, EXPERTS), chosen, weights, None, True)


def group_pairs(core: ModuleType, rows: int) -> None:
    chosen = torch.arange(rows * EXPERTS_PER_ROW, dtype=torch.int32).view(rows, -1) % EXPERTS
    moe.group_pairs(chosen, EXPERTS)


def expert_linear(core: ModuleType, experts: int, n: int, c: int) -> None:
    """Of one place for each expert: a weight is read once, whatever places it has."""
    x, weight = torch.zeros(experts, c, dtype=HALF), torch.zeros(experts * n, c, dtype=HALF)
    places = torch.arange(experts + 1, dtype=torch.int32)
    core.expert_linear(x, places[:-1], weight, None, places, torch.empty(experts, n), 0, n)


def combine_experts(core: ModuleType, rows: int) -> None:
    places = torch.arange(rows * EXPERTS_PER_ROW, dtype=torch.int32).view(rows, -1)
    y, weights = torch.zeros(places.numel(), MIXTURE.hidden), torch.zeros(rows, EXPERTS_PER_ROW)
    core.combine_experts(y, places, weights, None, None, torch.empty(rows, MIXTURE.hidden))


def rms_norm(core: ModuleType, rows: int) -> None:
    residual, delta = torch.zeros(2, rows, SHAPES.hidden)
    core.rms_norm(
        residual, delta, torch.zeros(SHAPES.hidden), torch.empty(rows, SHAPES.hidden, dtype=HALF), 1e-5, None, 0
    )


def silu_mul(core: ModuleType, rows: int) -> None:
    core.silu_mul(torch.zeros(rows, 2 * SHAPES.intermediate), torch.empty(rows, SHAPES.intermediate, dtype=HALF))


def gather_rows(core: ModuleType, rows: int) -> None:
    weight = torch.zeros(rows, SHAPES.hidden, dtype=HALF)
    core.gather_rows(weight, torch.arange(rows, dtype=torch.int32), torch.empty(rows, SHAPES.hidden))


def trees(batch: int, nodes: int) -> TreeBatch:
    """Returns a binary tree for every request."""
    tree = DraftTree([1] * nodes, [(node - 1) // 2 for node in range(nodes)])
    return binary_tree(nodes, CPU) if batch == 1 else TreeBatch.of([tree] * batch, CPU, masked=True)


def cache_of(tree: TreeBatch, batch: int, prefix: int, nodes: int) -> KVCacheView:
    """Returns one layer's cache behind `prefix` tokens of every request."""
    pages = -(-(prefix + nodes) // PAGE_SIZE)
    k, v = (torch.zeros(batch * pages, SHAPES.kv_heads, PAGE_SIZE, SHAPES.head_dim, dtype=HALF) for _ in range(2))
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    return KVCacheView(k, v, table, int_tensor([prefix] * batch, CPU), tree.row_start, 0)


def rope_cache(core: ModuleType, nodes: int, batch: int) -> None:
    tree, rows = trees(batch, nodes), nodes * batch
    cache = cache_of(tree, batch, PAGE_SIZE, nodes)
    cos, sin = torch.zeros(2, 2 * PAGE_SIZE + rows, SHAPES.head_dim // 2)
    qkv = torch.zeros(rows, (SHAPES.heads + 2 * SHAPES.kv_heads) * SHAPES.head_dim)
    q = torch.empty(rows, SHAPES.heads, SHAPES.head_dim)
    core.rope_cache(qkv, cos, sin, None, None, tree.depths, cache, q, 1e-5, 0)


def tree_attention(core: ModuleType, nodes: int, batch: int, prefix: int) -> None:
    tree, rows = trees(batch, nodes), nodes * batch
    cache = cache_of(tree, batch, prefix, nodes)
    q = torch.zeros(rows, SHAPES.heads, SHAPES.head_dim)
    out = torch.empty(rows, SHAPES.heads, SHAPES.head_dim, dtype=HALF)
    arguments = (q, cache, tree.ancestors, out, 1.0, 0, False)
    workspace = torch.empty(core.tree_attention_workspace(*arguments, None, None, None, None))
    core.tree_attention(*arguments, workspace, None, torch.zeros(rows * SHAPES.heads, dtype=torch.int32), None)


def history_of(batch: int) -> TokenHistory:
    """Returns the tokens of every request: 1,024 of a prompt and as many others."""
    return TokenHistory(*(int_tensor(x, CPU) for x in ([[1] * 4096] * batch, [2048] * batch, [1024] * batch)))


def verify(core: ModuleType, nodes: int, batch: int, vocabulary: int) -> tuple[TreeBatch, Accepted, TokenHistory]:
    """Greedy verification of trees whose leftmost path is accepted."""
    tree, rows = trees(batch, nodes), nodes * batch
    tree.tokens.copy_(torch.arange(rows) % nodes + 1)
    logits = torch.zeros(rows, vocabulary)
    for row in range(rows):
        child = 2 * (row % nodes) + 1
        logits[row, child + 1 if child < nodes else 0] = 1.0
    history = history_of(batch)
    table = SamplingTable.of([SamplingParams()] * batch, [0] * batch)
    accepted = ops.verify_tree.verify_tree(
        logits, tree, table, history, VerifyWorkspace.empty(batch, vocabulary, rows=rows)
    )
    return tree, accepted, history


def verify_tree(core: ModuleType, nodes: int, batch: int, vocabulary: int) -> None:
    verify(core, nodes, batch, vocabulary)


def verify_rule(core: ModuleType, nodes: int, batch: int, vocabulary: int, noted: int, rule: int, path: int) -> None:
    """A rule's walk at temperature 1 down a tree whose children come from distributions."""
    tree = trees(batch, nodes)
    tree.tokens.copy_(torch.arange(nodes) + 1)
    logits, inner = torch.zeros(nodes, vocabulary), nodes // 2
    draft, rows = torch.zeros(inner, vocabulary), torch.full((nodes,), -1, dtype=torch.int32)
    rows[:inner] = torch.arange(inner)
    for node in range(nodes):
        children = range(2 * node + 1, min(2 * node + 3, nodes))
        for likely, child in zip((14.0, 13.0), children, strict=False):
            draft[node, child + 1] = likely
        logits[node, children[0] + 1 if children and path == 0 else 0] = 30.0
    workspace = VerifyWorkspace.empty(batch, vocabulary, rows=nodes if noted else 0, weights=True)
    table = SamplingTable.of([SamplingParams(temperature=1.0)] * batch, [0] * batch)
    drafted = DraftLogits(draft, rows, None, False)
    accepted = ops.verify_tree.verify_tree(
        logits, tree, table, history_of(batch), workspace, parse_rule(RULES[rule]), drafted
    )
    if (length := int(accepted.path_length[0])) != (1 if path else nodes.bit_length()):
        raise RuntimeError(f"verify_rule: {RULES[rule]} accepted a path of {length} nodes")


def commit(core: ModuleType, nodes: int, batch: int) -> None:
    tree = trees(batch, nodes)
    depth = nodes.bit_length()
    accepted = Accepted.empty(batch, nodes)
    accepted.path.copy_(torch.arange(nodes).expand(batch, -1))
    for field in fields(Accepted):
        if field.name != "path":
            getattr(accepted, field.name).fill_(depth if field.name == "path_length" else 0)
    history = history_of(batch)
    ones = int_tensor([1] * batch, CPU)
    limits = Limits(int_tensor([2], CPU), ones, 4096 * ones, ones.clone())
    record = torch.zeros(batch, record_width(nodes), dtype=torch.int32)
    commit_tokens(tree, accepted, history, ones.clone(), limits, record)


def compact_kv(core: ModuleType, nodes: int, batch: int) -> None:
    pages = -(-(PAGE_SIZE // 2 + nodes) // PAGE_SIZE)
    shape = (SHAPES.layers, pages * batch, SHAPES.kv_heads, PAGE_SIZE, SHAPES.head_dim)
    k, v = (torch.zeros(shape, dtype=HALF) for _ in range(2))
    table = torch.arange(pages * batch, dtype=torch.int32).view(batch, pages)
    path = [2**depth - 1 for depth in range(nodes.bit_length())]
    paths = int_tensor([path + [-1] * (nodes - len(path))] * batch, CPU)
    core.compact_kv(k, v, table, int_tensor([PAGE_SIZE // 2] * batch, CPU), paths, int_tensor([len(path)] * batch, CPU))


def draft_lookup(core: ModuleType, nodes: int, batch: int) -> None:
    history = history_of(batch)
    final, active = int_tensor([4096] * batch, CPU), int_tensor([1] * batch, CPU)
    row_start = torch.arange(0, (batch + 1) * nodes, nodes, dtype=torch.int32)
    lookup(history.tokens, history.length, final, active, row_start, nodes, (1, 1))


def expand_level(core: ModuleType, vocabulary: int) -> None:
    """The first level of a chain."""
    roots, known = torch.ones(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    plan = GrowthPlan.of(Beam(CHAIN, 1), 1, CPU)
    GrowingTrees(plan, roots, known, None).add(Logits(torch.zeros(1, vocabulary)))


def select(core: ModuleType, nodes: int) -> None:
    """A whole chain."""
    depths = torch.arange(nodes, dtype=torch.int32)[None]
    select_nodes(depths, depths - 1, depths, -depths.float(), int_tensor([nodes], CPU), SelectedTrees.empty(1, nodes))


CASES: dict[str, Callable[..., None]] = {
    "linear": linear,
    "coded_linear": coded_linear,
    "route_rows": route_rows,
    "group_pairs": group_pairs,
    "expert_linear": expert_linear,
    "combine_experts": combine_experts,
    "rms_norm": rms_norm,
    "silu_mul": silu_mul,
    "gather_rows": gather_rows,
    "rope_cache": rope_cache,
    "tree_attention": tree_attention,
    "verify_tree": verify_tree,
    "verify_rule": verify_rule,
    "commit_tokens": commit,
    "compact_kv": compact_kv,
    "draft_lookup": draft_lookup,
    "expand_level": expand_level,
    "select_nodes": select,
}


def sizes() -> list[tuple[str, dict[str, int]]]:
    """Returns every op and size of the record."""
    found = []
    for op, axes in SAMPLED:
        found += [(op, dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
    return found


def count(
    core: ModuleType, op: str, size: dict[str, int], multiprocessors: int = MULTIPROCESSORS
) -> list[dict[str, Any]]:
    """Returns what the launches of an op do at a size. core: the simulator, which the ops' wrappers call."""
    core.set_multiprocessors(multiprocessors)
    core.set_schedule(0)
    core.set_counting(True)
    try:
        CASES[op](core, **size)
        return core.counted()
    finally:
        core.set_counting(False)


@cache
def name_of(core: ModuleType, address: int) -> str:
    """The short name of the kernel at an address of the simulator's file."""
    command = ["addr2line", "-f", "-C", "-e", core.__file__, hex(address)]
    return short(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0])


def kernels(core: ModuleType, addresses: set[int]) -> dict[int, dict[str, Any]]:
    """Returns name, registers of a thread and chain of loads of each kernel, by its address."""
    compiled = json.loads(PTXAS.read_text(encoding="utf-8"))["files"]
    registers = {row["kernel"]: row["registers"] for file in compiled.values() for row in file["sm_90a"]}
    chain_of = chains()
    names = {address: name_of(core, address) for address in addresses}
    return {at: {"name": name, "registers": registers[name], "chain": chain_of[name]} for at, name in names.items()}


def main() -> None:
    import pytest

    from tests.backends import use_core
    from tests.simulator.build import simulator

    core = simulator()
    with pytest.MonkeyPatch.context() as patch:
        use_core(core, patch)
        samples = [(op, size, count(core, op, size)) for op, size in sizes()]
    known = kernels(core, {launch["kernel"] for _, _, launches in samples for launch in launches})
    for _, _, launches in samples:
        for launch in launches:
            launch["kernel"] = known[launch["kernel"]]["name"]
    lines = [json.dumps({"op": op, "size": size, "launches": launches}) for op, size, launches in samples]
    by_name = {each["name"]: {key: each[key] for key in ("registers", "chain")} for each in known.values()}
    about = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(by_name.items())]
    text = '{"kernels": {\n' + ",\n".join(about) + '\n},\n"samples": [\n' + ",\n".join(lines) + "\n]}\n"
    RECORD.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
