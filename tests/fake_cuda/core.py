"""The core's ops for tensors of FakeCuda: each checks its arguments as csrc/ops does, and counts its kernels.

An op writes tensors that its caller made, so nothing is returned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specengine import _C
from tests.fake_cuda.mode import FakeCuda

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ANY = (*FLOATS, torch.uint8)
TYPES = {
    "f32": (torch.float32,),
    "f64": (torch.float64,),
    "i32": (torch.int32,),
    "i64": (torch.int64,),
    "u8": (torch.uint8,),
    "float": FLOATS,
    "any": ANY,
    "int": (torch.int32, torch.int64),
}
WORKSPACE = 1024  # floats that the fake attention asks for: any number shows whether the caller provides them


@dataclass(frozen=True)
class Op:
    """The contract of an op on CUDA.

    shapes: `name: type[sizes]` of each tensor, in the order of the op's arguments and of its records' fields.
    A name with ? may be None. Equal names of sizes are equal sizes; B+1 and N/32 are made of others; 64 is itself.
    kernels: those that a call launches.
    """

    shapes: str
    kernels: tuple[str, ...]


CACHE = (
    "k_cache: float[P,K,64,D]  v_cache: float[P,K,64,D]  "
    "block_table: i32[B,pages]  lengths: i32[B]  row_start: i32[B+1]"
)
STATES = "states: f32[pool,layers,Hv,Dk,Dv]  conv: f32[pool,layers,3,C]  slots: i32[B]  records: f32[kept,M,floats]"
SAMPLED = (
    "tokens: i32[M]  parents: i32[M]  row_start: i32[B+1]  temperature: f32[B]  top_k: i32[B]  top_p: f32[B]  "
    "min_p: f32[B]  repetition_penalty: f32[B]  presence_penalty: f32[B]  frequency_penalty: f32[B]  seed: i64[B]  "
    "bias_start: i32[B+1]  bias_tokens: i32[E]  bias_values: f32[E]  tokens: i32[B,T]  length: i32[B]  "
    "prompt_length: i32[B]"
)
PATHS = "path: i32[B,N]  path_length: i32[B]  bonus: i32[B]  relaxed: i32[B]"

OPS = {
    "gather_rows": Op("weight: float[V,C]  ids: int[M]  out: float[M,C]", ("gather_rows",)),
    "linear": Op("x: float[M,C]  weight: float[W,C]  bias?: f32[N]  out: f32[M,N]  masks?: i32[M,W/32]", ("linear",)),
    "linear_argmax": Op(
        "x: float[M,C]  weight: float[W,C]  bias?: f32[W]  masks?: i32[M,W/32]  ids: i32[M]  keys: i64[M]",
        ("forget_keys", "linear", "ids_of_keys"),
    ),
    "linear_silu": Op("x: float[M,C]  weight: float[I+I,C]  bias?: f32[I+I]  out: float[M,I]", ("fused_linear",)),
    "linear_norm": Op(
        "x: float[M,C]  weight: float[N,C]  bias?: f32[N]  residual: f32[M,N]  norm: f32[N]  out: float[M,N]  "
        "kept?: f32[M,L,N]  arrived: i32[counters]",
        ("fused_linear",),
    ),
    "linear_rope": Op(
        "x: float[M,C]  weight: float[Q,C]  bias?: f32[Q]  qkv: f32[M,Q]  cos: f32[T,D/2]  sin: f32[T,D/2]  "
        f"q_norm?: f32[D]  k_norm?: f32[D]  depths: i32[M]  {CACHE}  q: f32[M,H,D]  arrived: i32[counters]",
        ("fused_linear",),
    ),
    "gather_coded": Op("weight: u8[P,S,bytes]  ids: i32[M]  out: f32[M,C]", ("gather_coded",)),
    "coded_linear": Op("x: float[M,C]  weight: u8[P,S,bytes]  bias?: f32[N]  out: f32[M,N]", ("coded_linear",)),
    "coded_linear_argmax": Op(
        "x: float[M,C]  weight: u8[P,S,bytes]  bias?: f32[N]  ids: i32[M]  keys: i64[M]",
        ("forget_keys", "coded_linear", "ids_of_keys"),
    ),
    "route_rows": Op(
        "x: f32[M,C]  router: float[E,C]  bias?: f32[E]  shared_gate?: f32[C]  logits: f32[M,E]  experts: i32[M,k]  "
        "weights: f32[M,k]  shared_scale?: f32[M]",
        ("router_logits", "choose_experts"),
    ),
    "group_pairs": Op("experts: i32[M,k]  starts: i32[E+1]  rows: i32[P]  places: i32[M,k]", ("group_pairs",)),
    "expert_linear": Op(
        "x: float[R,C]  rows?: i32[P]  weight: float[W,C]  bias?: f32[E,N]  starts: i32[E+1]  out: f32[P,N]",
        ("expert_linear",),
    ),
    "coded_expert_linear": Op(
        "x: float[R,C]  rows?: i32[P]  weight: u8[panels,S,bytes]  bias?: f32[E,N]  starts: i32[E+1]  out: f32[P,N]",
        ("coded_expert_linear",),
    ),
    "combine_experts": Op(
        "y: f32[P,C]  places: i32[M,k]  weights: f32[M,k]  shared?: f32[M,C]  shared_scale?: f32[M]  out: f32[M,C]",
        ("combine_experts",),
    ),
    "rms_norm": Op(
        "residual: f32[M,C]  delta?: f32[M,C]  weight: f32[W]  out: float[M,C]  kept?: f32[M,L,C]", ("rms_norm",)
    ),
    "gather_norm": Op(
        "weight: float[V,C]  ids: i32[M]  residual: f32[M,C]  norm: f32[C]  out: float[M,C]  kept?: f32[M,L,C]",
        ("gather_norm",),
    ),
    "silu_mul": Op("gate_up: f32[M,I+I]  out: float[M,I]", ("silu_mul",)),
    "clamped_swiglu": Op("gate_up: f32[M,I+I]  out: float[M,I]", ("clamped_swiglu",)),
    "rope_cache": Op(
        f"qkv: f32[M,Q]  cos: f32[T,D/2]  sin: f32[T,D/2]  q_norm?: f32[q]  k_norm?: f32[k]  depths: i32[M]  "
        f"{CACHE}  q: f32[M,H,D]",
        ("rope_cache",),
    ),
    "gate_heads": Op("qkv: f32[M,Q]  heads: float[M,H,D]", ("gate_heads",)),
    "gated_delta": Op(
        f"rows: f32[M,R]  {STATES}  row_start: i32[B+1]  ancestors?: i32[M,words]  out: float[M,values]",
        ("record", "tree"),
    ),
    "tree_attention": Op(
        f"q: f32[M,H,D]  {CACHE}  ancestors: i32[M,words]  out: float[M,H,D]  workspace: f32[n]  sinks?: f32[H]  "
        "arrived: i32[counters]  upcoming?: any[next]",
        ("tensor_attention",),
    ),
    "expand_backbone": Op(
        "logits: f32[B,L,V]  root: i32[B]  thresholds: f32[C]  widths: i32[C+1]  "
        "tokens: i32[B,N]  parents: i32[B,N]  depths: i32[B,N]  scores: f32[B,N]  ancestors: i32[B,N,N/32]  "
        "node_counts: i32[B]  top_tokens: i32[B,L,S,k]  top_scores: f32[B,L,S,k]  sums: f32[B,L,S]  arrived: i32[B]  "
        "token_ids?: i32[V]",
        ("expand_levels",),
    ),
    "select_nodes": Op(
        "tokens: i32[B,C]  parents: i32[B,C]  depths: i32[B,C]  scores: f32[B,C]  limits: i32[B]  "
        "out_tokens: i32[B,N]  out_parents: i32[B,N]  out_depths: i32[B,N]  kept: i32[B,N]  ancestors: i32[B,N,N/32]  "
        "node_counts: i32[B]",
        ("select_nodes",),
    ),
    "pair_rows": Op(
        "history: i32[B,T]  history_length: i32[B]  counts: i32[B]  first: i32[B]  tokens: i32[M]  parents: i32[M]  "
        "depths: i32[M]  ancestors: i32[M,words]  last: i64[B,slots]  ends: i32[3,B]  above?: i64[M]  "
        "blocks?: i32[B,S]",
        ("pair_rows",),
    ),
    "keep_pairs": Op(
        "rows: float[M,C]  row_start: i32[B+1]  path: i32[B,N]  path_length: i32[B]  history_length: i32[B]  "
        "kept: float[slots,R,C]  counts: i32[slots]  first: i32[slots]",
        ("keep_pairs",),
    ),
    "keep_last": Op(
        "rows: float[M,C]  row_start: i32[B+1]  path: i32[B,N]  path_length: i32[B]  kept: f32[slots,C]  "
        "known: i32[slots]",
        ("keep_last",),
    ),
    "add_delta": Op("x?: f32[M,C]  delta: f32[M,C]  sum?: f32[M,C]  out?: float[M,C]", ("add_delta",)),
    "gru_step": Op(
        "read: f32[R,parts]  kept?: f32[S,parts]  state?: f32[S,G]  above?: i64[R]  next: f32[R,G]  "
        "rounded?: float[R,G]",
        ("gru_step",),
    ),
    "top_tokens": Op(
        "logits: f32[R,V]  tokens: i32[R,S,k]  scores: f32[R,S,k]  sums: f32[R,S]  arrived: i32[counters]  "
        "tokens: i32[R,k]  log_probs: f32[R,k]",
        ("top_tokens",),
    ),
    "expand_node": Op(
        "logits: f32[B,V]  delta?: f32[B,V]  confidence?: f32[B]  thresholds?: f32[C]  widths?: i32[C]  "
        "tokens: i32[B,S,k]  scores: f32[B,S,k]  sums: f32[B,S]  arrived: i32[counters]  tokens: i32[B,N,k]  "
        "log_probs: f32[B,N,k]  confidences?: f32[B,N]  "
        "ranks: i32[B,N]  next: i32[B,N]  steps: i32[B,N]  scores: f64[B,N]  counts: i32[B]  opened: i32[B]  "
        "token_ids?: i32[V]  roots: i32[B,1]  known: i32[B]  limits?: i32[B]  history_length?: i32[B]  "
        "final_length?: i32[B]  active?: i32[B]  tokens: i32[B,N]  parents: i32[B,N]  depths: i32[B,N]  "
        "scores: f32[B,N]  beam: i32[B,1]  tokens: i32[B]  depths: i32[B]  ancestors: i32[B,W]  above: i64[B]  "
        "ranks?: i32[C]  parents?: i32[C]  depths?: i32[C]  thresholds?: f32[C]  widths?: i32[C]",
        ("expand_node",),
    ),
    "expand_levels": Op(
        "logits: f32[R,V]  ranks?: i32[N]  parents?: i32[N]  depths?: i32[N]  thresholds?: f32[C]  widths?: i32[C+1]  "
        "tokens: i32[R,S,k]  scores: f32[R,S,k]  sums: f32[R,S]  arrived: i32[counters]  token_ids?: i32[V]  "
        "roots?: i32[B,1]  history?: i32[B,T]  known: i32[B]  limits?: i32[B]  history_length?: i32[B]  "
        "final_length?: i32[B]  active?: i32[B]  tokens: i32[B,M]  parents: i32[B,M]  depths: i32[B,M]  "
        "scores: f32[B,M]",
        ("expand_levels",),
    ),
    "text_rows": Op(
        "history: i32[B,T]  history_length: i32[B]  active: i32[B]  block_table: i32[B,P]  first: i32[B]  "
        "tokens: i32[M]  parents: i32[M]  depths: i32[M]  ancestors: i32[M,W]  lengths: i32[M]  "
        "block_table: i32[M,P]  ancestors: i32[M,1]  last: i64[B,slots]  counts: i32[5,B]",
        ("text_rows",),
    ),
    "join_rows": Op(
        "left: float[L,C]  ids?: i32[M]  right: f32[R,D]  above?: i64[M]  left_norm?: f32[C]  right_norm?: f32[D]  "
        "stream?: f32[M,D]  out: float[M,both]",
        ("join_rows",),
    ),
    "grow_level": Op(
        "best_tokens: i32[best,k]  best_scores: f32[best,k]  token_ids?: i32[V]  order?: i32[w]  listed?: i32[E]  "
        "roots: i32[B,1]  known: i32[B]  tokens: i32[B,C]  parents: i32[B,C]  depths: i32[B,C]  scores: f32[B,C]  "
        "beam: i32[B,before]  tokens?: i32[R]  depths?: i32[R]  ancestors: i32[R,W]  above?: i64[R]  beam: i32[B,w]  "
        "tokens: i32[next]  "
        "depths: i32[next]  ancestors: i32[next,W]  above: i64[next]  origin?: i64[R]",
        ("grow_level",),
    ),
    "expand_level": Op(
        "logits: f32[rows,V]  delta?: f32[R,V]  confidence?: f32[chances]  thresholds?: f32[T]  "
        "widths?: i32[classes]  tokens: i32[R,S,k]  scores: f32[R,S,k]  sums: f32[R,S]  arrived: i32[B]  "
        "token_ids?: i32[V]  order?: i32[w]  listed?: i32[E]  roots: i32[B,1]  known: i32[B]  tokens: i32[B,C]  "
        "parents: i32[B,C]  depths: i32[B,C]  scores: f32[B,C]  beam: i32[B,before]  tokens?: i32[R]  depths?: i32[R]  "
        "ancestors: i32[R,W]  above?: i64[R]  beam: i32[B,w]  tokens: i32[next]  depths: i32[next]  "
        "ancestors: i32[next,W]  above: i64[next]  origin?: i64[R]",
        ("expand_level",),
    ),
    "add_copies": Op(
        "history: i32[B,T]  history_length: i32[B]  active: i32[B]  known: i32[B]  chances: f32[5]  tokens: i32[B,C]  "
        "parents: i32[B,C]  depths: i32[B,C]  scores: f32[B,C]  tokens: i32[B,J]  parents: i32[B,J]  depths: i32[B,J]  "
        "scores: f32[B,J]  known: i32[B]",
        ("add_copies",),
    ),
    "select_limited": Op(
        "tokens: i32[B,C]  parents: i32[B,C]  depths: i32[B,C]  scores: f32[B,C]  known: i32[B]  "
        "history_length: i32[B]  final_length: i32[B]  active: i32[B]  tokens: i32[B,N]  parents: i32[B,N]  "
        "depths: i32[B,N]  kept: i32[B,N]  ancestors: i32[B,N,N/32]  node_counts: i32[B]",
        ("select_nodes",),
    ),
    "draft_lookup": Op(
        "history: i32[B,T]  history_length: i32[B]  final_length: i32[B]  active: i32[B]  tokens: i32[M]  "
        "parents: i32[M]  depths: i32[M]  ancestors: i32[M,words]",
        ("draft_lookup",),
    ),
    "draw_siblings": Op(
        f"logits: f32[R,C]  requests: i32[R]  nodes: i32[R]  index?: i32[V]  {SAMPLED}  drawn: i32[R,k]  "
        "scores: f32[R,V]  counts: i32[R,V]  weights: i64[R,V]",
        ("draw_siblings",),
    ),
    "verify_tree": Op(
        f"logits: f32[M,V]  {SAMPLED}  logits?: f32[R,C]  rows?: i32[M]  token_index?: i32[V]  "
        f"masks?: i32[M,V/32]  {PATHS}  "
        "scores: f32[B,V]  counts: i32[B,V]  row_states?: i64[M,states]  weights?: i64[B,planes,V]",
        ("mark", "filter", "draw", "finish"),
    ),
    "commit_tokens": Op(
        f"tokens: i32[M]  parents: i32[M]  {PATHS}  eos: i32[E]  ignores_eos: i32[B]  final_length: i32[B]  "
        "history: i32[B,T]  history_length: i32[B]  cached: i32[B]  active: i32[B]  record: i32[B,columns]",
        ("commit_tokens",),
    ),
    "compact_kv": Op(
        "k_cache: float[layers,P,K,64,D]  v_cache: float[layers,P,K,64,D]  block_table: i32[B,pages]  "
        "lengths: i32[B]  path: i32[B,N]  path_length: i32[B]",
        ("compact_kv",),
    ),
    "compact_states": Op(f"{STATES}  row_start: i32[B+1]  path: i32[B,N]  path_length: i32[B]", ("compact_states",)),
}
MOST_NOTED_ROWS = 512  # of verify_tree by a rule other than match: with more, one block walks a tree
NOTES = ("mark_rows", "tops", "filter_rows", "sums", "merge")
PREPARED = {"opt": 1, "token_v1": 2, "token_v2": 2, "token_v3": 2}
STEPS, STEPS_FROM_LEAVES = 3, 8
UNDER_MASKS = ("mark", "filter", "draw_masked", "finish")  # by match, with masks


class FakeCore:
    """Stands in for specengine._C in the ops' wrappers; what is no op is the core's own."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name == "tree_attention_workspace":
            return lambda *_: WORKSPACE
        return functools.partial(self._run, name) if name in OPS else getattr(_C, name)

    def _run(self, name: str, *arguments: Any) -> None:
        check(name, arguments)
        kernels = OPS[name].kernels
        if name == "verify_tree":
            logits, _, draft, masks, _, workspace, rule, _ = arguments
            by_match = kernels if masks is None else UNDER_MASKS
            noted = workspace.row_states is not None and len(logits) <= MOST_NOTED_ROWS and rule != "margin_strict"
            kernels = by_match if rule == "match" else walks(rule, draft.logits is not None) if noted else ("walk",)
        self._device.launch(kernels)


def walks(rule: str, drafted: bool) -> tuple[str, ...]:
    """The kernels of verify_tree by a rule other than match, with notes on rows."""
    prepared = PREPARED.get(rule, 0) if drafted else 0
    steps = STEPS_FROM_LEAVES if rule in ("block", "traversal") else STEPS
    return (*NOTES, *["prepare"] * prepared, *["walk_notes"] * (steps + 1))


def check(name: str, arguments: tuple) -> None:
    """Raises ValueError naming the tensor that breaks the op's contract, or that is not on the device."""
    given = [value for value in _flat(arguments) if value is None or isinstance(value, torch.Tensor)]
    wanted = OPS[name].shapes.split("  ")
    if len(given) != len(wanted):
        raise ValueError(f"{name}: expected {len(wanted)} tensors, got {len(given)}")
    sizes: dict[str, int] = {}
    for text, tensor in zip(wanted, given, strict=True):
        label, _, rest = text.partition(": ")
        kind, _, shape = rest.removesuffix("]").partition("[")
        if tensor is None and label.endswith("?"):
            continue
        _check_tensor(f"{name}: {label.removesuffix('?')}", tensor, TYPES[kind], shape.split(","), sizes)


def _check_tensor(
    name: str, tensor: torch.Tensor | None, types: tuple[torch.dtype, ...], shape: list[str], sizes: dict[str, int]
) -> None:
    if tensor is None:
        raise ValueError(f"{name}: expected a tensor, got None")
    if tensor.device.type != "cuda":
        raise ValueError(f"{name}: is on {tensor.device}")
    if tensor.dtype not in types or tensor.dim() != len(shape) or not tensor.is_contiguous():
        raise ValueError(f"{name}: expected {types} [{','.join(shape)}], got {tensor.dtype} {tuple(tensor.shape)}")
    for text, size in zip(shape, tensor.shape, strict=True):
        if size != _size(text, size, sizes):
            raise ValueError(f"{name}: expected [{','.join(shape)}] with {sizes}, got {tuple(tensor.shape)}")


def _size(text: str, given: int, sizes: dict[str, int]) -> int:
    """Returns a size; a name that was not met before gets the given one."""
    if text.isdigit():
        return int(text)
    first, sign, second = text.replace("/", "+/").partition("+")
    if not sign:
        return sizes.setdefault(first, given)
    if second == "/32":
        return -(-sizes[first] // 32)
    if second == "/2":
        return sizes[first] // 2 if first in sizes else given
    if second.isdigit():
        return sizes[first] + int(second) if first in sizes else given
    sizes.setdefault(first, given // 2)
    return 2 * sizes[first]


def _flat(values: tuple) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            yield from _flat(value)
        else:
            yield value
