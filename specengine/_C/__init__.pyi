# The native core. Written by csrc/bindings/write_stub.py from the built module: do not edit.
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

class CodedForm(NamedTuple):
    kind: str
    group: int
    scales: str
    offset: str

class KVCacheView(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    lengths: Tensor
    row_start: Tensor
    first_node: int

class Multipliers(NamedTuple):
    embedding: float
    attention: float
    residual: float

class RopeTables(NamedTuple):
    cos: Tensor
    sin: Tensor

class RotatedRows(NamedTuple):
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    depths: Tensor

class PassOutputs(NamedTuple):
    hidden_states: Tensor | None
    at_layers: Tensor | None
    experts: Tensor | None

class DeltaStates(NamedTuple):
    states: Tensor | None
    conv: Tensor | None
    slots: Tensor | None
    records: Tensor | None
    final: bool

class SamplingTable(NamedTuple):
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    bias_start: Tensor
    bias_tokens: Tensor
    bias_values: Tensor

class TokenHistory(NamedTuple):
    tokens: Tensor
    length: Tensor
    prompt_length: Tensor

class SampledTrees(NamedTuple):
    tokens: Tensor
    parents: Tensor
    row_start: Tensor
    sampling: SamplingTable
    history: TokenHistory

class DraftLogits(NamedTuple):
    logits: Tensor | None
    rows: Tensor | None
    token_index: Tensor | None
    replacement: bool

class AcceptedPaths(NamedTuple):
    path: Tensor
    path_length: Tensor
    bonus: Tensor
    relaxed: Tensor

class VerifyWorkspace(NamedTuple):
    scores: Tensor
    counts: Tensor
    row_states: Tensor | None
    weights: Tensor | None

class BackboneTrees(NamedTuple):
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    ancestors: Tensor
    node_counts: Tensor

class CandidateColumns(NamedTuple):
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor

class BeamRows(NamedTuple):
    beam: Tensor
    tokens: Tensor
    depths: Tensor
    ancestors: Tensor
    above: Tensor

class LevelEntries(NamedTuple):
    order: Tensor | None
    listed: Tensor | None

class VocabularyParts(NamedTuple):
    tokens: Tensor
    scores: Tensor
    sums: Tensor
    arrived: Tensor

class LevelLogits(NamedTuple):
    logits: Tensor
    delta: Tensor | None
    confidence: Tensor | None
    thresholds: Tensor | None
    widths: Tensor | None

class LevelShape(NamedTuple):
    kind: int
    ranks: Tensor | None
    parents: Tensor | None
    depths: Tensor | None
    thresholds: Tensor | None
    widths: Tensor | None
    beta: float

class DepthLimits(NamedTuple):
    limits: Tensor | None
    history_length: Tensor | None
    final_length: Tensor | None
    active: Tensor | None

class OpenedNodes(NamedTuple):
    tokens: Tensor
    log_probs: Tensor
    confidences: Tensor | None
    ranks: Tensor
    next: Tensor
    steps: Tensor
    scores: Tensor
    counts: Tensor
    opened: Tensor

class SelectedTrees(NamedTuple):
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    kept: Tensor
    ancestors: Tensor
    node_counts: Tensor

class ChainColumns(NamedTuple):
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor

class SeenKeys(NamedTuple):
    lengths: Tensor
    block_table: Tensor
    ancestors: Tensor
    block: int

class GatedDeltaLayer:
    def __init__(
        self, conv: Tensor, decay: Tensor, dt_bias: Tensor, norm: Tensor, key_heads: int, tiled: bool
    ) -> None: ...

class Projection:
    def __init__(
        self,
        weights: Sequence[Tensor],
        rows: Sequence[int],
        bias: Tensor | None,
        columns: Tensor | None,
        float_rows: bool,
    ) -> None: ...

class ExpertProjection:
    def __init__(
        self, weights: Sequence[Tensor], rows: Sequence[int], bias: Tensor | None, float_rows: bool
    ) -> None: ...

class MoeLayer:
    def __init__(
        self,
        router: Tensor,
        router_bias: Tensor | None,
        shared_gate: Tensor | None,
        renormalise: bool,
        per_token: int,
        intermediate: int,
        gate_up: ExpertProjection,
        down: ExpertProjection,
        swiglu_limit: float,
        swiglu_alpha: float,
    ) -> None: ...

class LoraModule:
    def __init__(self, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, first: int, rows: int) -> None: ...

class LoraProjection:
    def __init__(self, modules: Sequence[LoraModule]) -> None: ...
    def workspace_floats(self, rows: int) -> int: ...

class LoraLayer:
    def __init__(
        self, qkv: LoraProjection, attention_out: LoraProjection, gate_up: LoraProjection, down: LoraProjection
    ) -> None: ...

class DecoderLayer:
    def __init__(
        self,
        attention_norm: Tensor | None,
        qkv: Projection,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        attention_out: Projection,
        mlp_norm: Tensor,
        gate_up: Projection,
        down: Projection,
        window: int,
        moe: Sequence[MoeLayer],
        sinks: Tensor | None,
        gated_delta: Sequence[GatedDeltaLayer],
    ) -> None: ...

class Decoder:
    def __init__(
        self,
        embedding: Tensor | None,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        eps: float,
        first_columns: int,
        hidden_state_layers: Sequence[int],
        lora: Sequence[LoraLayer],
        multipliers: Multipliers,
        rotated: int,
    ) -> None: ...
    def workspace_bytes(self, rows: int) -> int: ...

class EagleWeights:
    def __init__(
        self,
        decoder: Decoder,
        embedding: Tensor,
        embedding_norm: Tensor | None,
        hidden_state_norm: Tensor | None,
        fuse: Projection,
        before_residual: bool,
        feed_back: bool,
        head: Projection,
        vocabulary: Tensor | None,
    ) -> None: ...
    def fetch(self) -> None: ...

class FastEagleWeights:
    def __init__(
        self,
        decoder: Decoder,
        embedding: Tensor,
        fuse: Projection,
        embedding_norm: Tensor | None,
        hidden_state_norm: Tensor | None,
        head_norm: Tensor | None,
        head: Projection,
        markov_rank: int,
        markov_tokens: Tensor | None,
        markov_head: Projection,
        vocabulary: Tensor | None,
    ) -> None: ...

class DraftHead:
    def __init__(self, blocks: Sequence[Projection], logits: Projection) -> None: ...

class HeadsWeights:
    def __init__(self, hidden: int, heads: Sequence[DraftHead], vocabulary: Tensor | None) -> None: ...

class GlideWeights:
    def __init__(
        self,
        decoder: Decoder,
        embedding: Tensor,
        embedding_rows: int,
        queries: Sequence[Projection],
        outs: Sequence[Projection],
        target_heads: int,
        target_head_dim: int,
        reach: int,
        block: int,
        head: Projection,
        vocabulary: Tensor | None,
    ) -> None: ...

class GrowthShape:
    def __init__(
        self,
        children: int,
        beam: int,
        nodes: int,
        thresholds: Sequence[float],
        widths: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
        ranks: Sequence[int],
    ) -> None: ...

class SuffixAutomaton:
    def __init__(self) -> None: ...
    def append(self, tokens: Sequence[int]) -> None: ...
    def cut(self) -> None: ...
    def count(self, string: Sequence[int]) -> int: ...
    @property
    def bytes(self) -> int: ...
    def continuations(
        self, context: Sequence[int], nodes: int, deepest: int, width: int, rates: Sequence[float], least: float
    ) -> tuple[list[int], list[int], list[int]]: ...
    def __len__(self) -> int: ...

class TextCorpus:
    def __init__(self, tokens: Tensor, order: Tensor) -> None: ...
    def continuations(
        self, context: Sequence[int], nodes: int, deepest: int, width: int, rates: Sequence[float], least: float
    ) -> tuple[list[int], list[int], list[int]]: ...
    def __len__(self) -> int: ...

class NgramIndex:
    def __init__(self, min_ngram: int, max_ngram: int) -> None: ...
    def append(self, tokens: Sequence[int]) -> None: ...
    def draft(
        self, most: int, nodes: int, deepest: int, rates: Sequence[float], least: float
    ) -> tuple[list[int], list[int], list[int]]: ...
    def skip(self) -> None: ...
    def judge(self, committed: Sequence[int]) -> list[tuple[int, bool]]: ...
    def __len__(self) -> int: ...

class PhrasePool:
    def __init__(self, length: int, width: int, keys: int) -> None: ...
    def insert(self, token: int, phrase: Sequence[int]) -> None: ...
    def replace(self, token: int, before: Sequence[int], after: Sequence[int]) -> None: ...
    def newest(self, token: int, most: int) -> list[list[int]]: ...
    def tokens(self) -> list[int]: ...
    def __len__(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def most_bytes(self) -> int: ...

class TextDrafts:
    def __init__(
        self,
        texts: Sequence[SuffixAutomaton | TextCorpus],
        context: Sequence[int],
        nodes: int,
        deepest: int,
        width: int,
        rates: Sequence[Sequence[float]],
        least: float,
    ) -> None: ...
    def tree(self) -> tuple[list[int], list[int], list[float]]: ...
    def judge(self, committed: Sequence[int]) -> list[tuple[int, int, bool]]: ...
    def count(
        self, tokens: Sequence[int], parents: Sequence[int], names: Sequence[str], accepted: Sequence[int]
    ) -> list[tuple[str, int, list[int]]]: ...

class TreeRows:
    def __init__(
        self, tokens: Tensor, parents: Tensor, depths: Tensor, row_start: Tensor, ancestors: Tensor | None
    ) -> None: ...
    def write(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> None: ...

class MappedFile:
    def __init__(self, descriptor: int, size: int) -> None: ...
    @property
    def size(self) -> int: ...
    def use_large_pages(self, begin: int) -> int: ...

def pack_linear(rows: Tensor, packed: Tensor, first: int) -> None: ...
def pack_blocks(rows: Tensor, packed: Tensor, first: int, type: str) -> None: ...
def pack_coded(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minima: Tensor | None,
    table: Tensor | None,
    packed: Tensor,
    first: int,
    group: int,
) -> None: ...
def requantise_blocks(rows: Tensor, packed: Tensor, first: int, type: str) -> None: ...
def unpack_blocks(rows: Tensor, values: Tensor, type: str) -> None: ...
def gather_rows(weight: Tensor, ids: Tensor, out: Tensor) -> None: ...
def quantise_rows(x: Tensor, out: Tensor, columns: Tensor | None) -> None: ...
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    first: int,
    rows: int,
    variant: int,
    masks: Tensor | None,
) -> None: ...
def linear_argmax(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    masks: Tensor | None,
    ids: Tensor,
    keys: Tensor,
    rows: int,
    variant: int,
) -> None: ...
def linear_silu(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, variant: int) -> None: ...
def linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    out: Tensor,
    kept: Tensor | None,
    arrived: Tensor,
    eps: float,
    place: int,
    variant: int,
) -> None: ...
def linear_rope(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    qkv: Tensor,
    rows: RotatedRows,
    cache: KVCacheView,
    q: Tensor,
    arrived: Tensor,
    eps: float,
    variant: int,
) -> None: ...
def gather_coded(weight: Tensor, form: CodedForm, ids: Tensor, out: Tensor) -> None: ...
def coded_linear(
    x: Tensor, weight: Tensor, form: CodedForm, bias: Tensor | None, out: Tensor, first: int, rows: int
) -> None: ...
def coded_linear_argmax(
    x: Tensor, weight: Tensor, form: CodedForm, bias: Tensor | None, ids: Tensor, keys: Tensor, rows: int
) -> None: ...
def rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float, kept: Tensor | None, place: int
) -> None: ...
def gather_norm(
    weight: Tensor,
    ids: Tensor,
    residual: Tensor,
    norm: Tensor,
    out: Tensor,
    kept: Tensor | None,
    eps: float,
    place: int,
) -> None: ...
def silu_mul(gate_up: Tensor, out: Tensor) -> None: ...
def clamped_swiglu(gate_up: Tensor, out: Tensor, limit: float, alpha: float) -> None: ...
def rope_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    depths: Tensor,
    cache: KVCacheView,
    q: Tensor,
    eps: float,
    first: int,
) -> None: ...
def gate_heads(qkv: Tensor, heads: Tensor) -> None: ...
def gated_delta(
    rows: Tensor,
    layer: GatedDeltaLayer,
    states: DeltaStates,
    number: int,
    row_start: Tensor,
    ancestors: Tensor | None,
    out: Tensor,
    eps: float,
) -> None: ...
def tree_attention(
    q: Tensor,
    cache: KVCacheView,
    ancestors: Tensor | None,
    out: Tensor,
    scale: float,
    window: int,
    strict: bool,
    workspace: Tensor | None,
    sinks: Tensor | None,
    arrived: Tensor | None,
    upcoming: Tensor | None,
) -> None: ...
def tree_attention_workspace(
    q: Tensor,
    cache: KVCacheView,
    ancestors: Tensor | None,
    out: Tensor,
    scale: float,
    window: int,
    strict: bool,
    workspace: Tensor | None,
    sinks: Tensor | None,
    arrived: Tensor | None,
    upcoming: Tensor | None,
) -> int: ...
def route_rows(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    shared_gate: Tensor | None,
    logits: Tensor,
    experts: Tensor,
    weights: Tensor,
    shared_scale: Tensor | None,
    renormalise: bool,
) -> None: ...
def group_pairs(experts: Tensor, starts: Tensor, rows: Tensor, places: Tensor) -> None: ...
def expert_linear(
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    out: Tensor,
    first: int,
    columns: int,
) -> None: ...
def coded_expert_linear(
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    form: CodedForm,
    bias: Tensor | None,
    starts: Tensor,
    out: Tensor,
    first: int,
    columns: int,
) -> None: ...
def combine_experts(
    y: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, shared_scale: Tensor | None, out: Tensor
) -> None: ...
def add_lora(
    x: Tensor, projection: LoraProjection, row_start: Tensor, adapters: Tensor, out: Tensor, workspace: Tensor
) -> None: ...
def decoder_pass(
    decoder: Decoder,
    tokens: Tensor | None,
    inputs: Tensor | None,
    first_inputs: Tensor | None,
    depths: Tensor,
    ancestors: Tensor | None,
    cache: KVCacheView,
    rope: RopeTables,
    outputs: PassOutputs,
    workspace: Tensor,
    adapters: Tensor | None,
    states: DeltaStates,
) -> None: ...
def expand_backbone(
    logits: Tensor,
    root: Tensor,
    thresholds: Tensor,
    widths: Tensor,
    trees: BackboneTrees,
    top_tokens: Tensor,
    top_scores: Tensor,
    sums: Tensor,
    arrived: Tensor,
    token_ids: Tensor | None,
) -> None: ...
def draft_trees(
    weights: EagleWeights | FastEagleWeights | HeadsWeights | GlideWeights,
    shape: GrowthShape,
    runs: Sequence[Sequence[int]],
    hidden_states: Tensor | None,
    rows: Sequence[int],
    pages: Sequence[Sequence[int]],
    cached: Sequence[int],
    caches: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    limits: Sequence[int],
    levels: int,
    min_gain: float,
    min_reach: float,
) -> tuple[list[tuple[list[int], list[int], list[float]]], int]: ...
def another_level_pays(scores: Tensor, beam: Tensor, level: int, min_gain: float) -> bool: ...
def pair_rows(
    history: Tensor,
    history_length: Tensor,
    counts: Tensor,
    first: Tensor,
    rows: ChainColumns,
    last: Tensor,
    ends: Tensor,
    above: Tensor | None,
    blocks: Tensor | None,
    unread: int,
    masks: int,
    mask_token: int,
) -> None: ...
def keep_pairs(
    rows: Tensor,
    row_start: Tensor,
    path: Tensor,
    path_length: Tensor,
    history_length: Tensor,
    kept: Tensor,
    counts: Tensor,
    first: Tensor,
    add: bool,
) -> None: ...
def keep_last(
    rows: Tensor, row_start: Tensor, path: Tensor, path_length: Tensor, kept: Tensor, known: Tensor
) -> None: ...
def text_rows(
    history: Tensor,
    history_length: Tensor,
    active: Tensor,
    block_table: Tensor,
    first: Tensor,
    rows: ChainColumns,
    seen: SeenKeys,
    last: Tensor,
    counts: Tensor,
    unread: int,
    masks: int,
    mask_token: int,
) -> None: ...
def join_rows(
    left: Tensor,
    ids: Tensor | None,
    right: Tensor,
    above: Tensor | None,
    left_norm: Tensor | None,
    right_norm: Tensor | None,
    stream: Tensor | None,
    out: Tensor,
    norms_stream: bool,
    eps: float,
) -> None: ...
def add_delta(x: Tensor | None, delta: Tensor, sum: Tensor | None, out: Tensor | None, silu: bool) -> None: ...
def gru_step(
    read: Tensor, kept: Tensor | None, state: Tensor | None, above: Tensor | None, next: Tensor, rounded: Tensor | None
) -> None: ...
def add_copies(
    history: Tensor,
    history_length: Tensor,
    active: Tensor,
    known: Tensor,
    chances: Tensor,
    candidates: CandidateColumns,
    joined: CandidateColumns,
    joined_known: Tensor,
    min_ngram: int,
    max_ngram: int,
) -> None: ...
def grow_level(
    best_tokens: Tensor,
    best_scores: Tensor,
    token_ids: Tensor | None,
    entries: LevelEntries,
    roots: Tensor,
    known: Tensor,
    candidates: CandidateColumns,
    before: BeamRows,
    after: BeamRows,
    origin: Tensor | None,
    first: int,
    first_node: int,
) -> None: ...
def expand_level(
    level: LevelLogits,
    parts: VocabularyParts,
    token_ids: Tensor | None,
    entries: LevelEntries,
    roots: Tensor,
    known: Tensor,
    candidates: CandidateColumns,
    before: BeamRows,
    after: BeamRows,
    origin: Tensor | None,
    first: int,
    first_node: int,
) -> None: ...
def top_tokens(logits: Tensor, parts: VocabularyParts, tokens: Tensor, log_probs: Tensor) -> None: ...
def expand_levels(
    logits: Tensor,
    shape: LevelShape,
    parts: VocabularyParts,
    token_ids: Tensor | None,
    roots: Tensor | None,
    history: Tensor | None,
    known: Tensor,
    limits: DepthLimits,
    candidates: CandidateColumns,
    levels: int,
    by_request: bool,
) -> None: ...
def expand_node(
    level: LevelLogits,
    parts: VocabularyParts,
    nodes: OpenedNodes,
    token_ids: Tensor | None,
    roots: Tensor,
    known: Tensor,
    limits: DepthLimits,
    candidates: CandidateColumns,
    after: BeamRows,
    shape: LevelShape,
    levels: int,
    step: int,
) -> None: ...
def select_limited(
    candidates: CandidateColumns,
    known: Tensor,
    history_length: Tensor,
    final_length: Tensor,
    active: Tensor,
    trees: SelectedTrees,
    levels: int,
) -> None: ...
def select_nodes(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    scores: Tensor,
    limits: Tensor,
    out_tokens: Tensor,
    out_parents: Tensor,
    out_depths: Tensor,
    kept: Tensor,
    ancestors: Tensor,
    node_counts: Tensor,
) -> None: ...
def draw_siblings(
    logits: Tensor,
    requests: Tensor,
    nodes: Tensor,
    index: Tensor | None,
    trees: SampledTrees,
    drawn: Tensor,
    scores: Tensor,
    counts: Tensor,
    weights: Tensor,
    replacement: bool,
    as_match: bool,
) -> None: ...
def draft_lookup(
    history: Tensor,
    history_length: Tensor,
    final_length: Tensor,
    active: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    min_ngram: int,
    max_ngram: int,
) -> None: ...
def verify_tree(
    logits: Tensor,
    trees: SampledTrees,
    draft: DraftLogits,
    masks: Tensor | None,
    accepted: AcceptedPaths,
    workspace: VerifyWorkspace,
    rule: str,
    options: Sequence[float],
) -> None: ...
def commit_tokens(
    tokens: Tensor,
    parents: Tensor,
    accepted: AcceptedPaths,
    eos: Tensor,
    ignores_eos: Tensor,
    final_length: Tensor,
    history: Tensor,
    history_length: Tensor,
    cached: Tensor,
    active: Tensor,
    record: Tensor,
) -> None: ...
def compact_kv(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths: Tensor, path: Tensor, path_length: Tensor
) -> None: ...
def compact_states(
    states: DeltaStates, row_start: Tensor, path: Tensor, path_length: Tensor, key_heads: int, tiled: bool
) -> None: ...
def sort_suffixes(tokens: Tensor, order: Tensor) -> None: ...
def join_trees(
    first: tuple[Sequence[int], Sequence[int], Sequence[float]],
    second: tuple[Sequence[int], Sequence[int], Sequence[float]],
    pooled: bool,
) -> tuple[list[int], list[int], list[float]]: ...
def cut_trees(
    trees: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]], costs: Sequence[float], most: int
) -> list[tuple[list[int], list[int]]]: ...
def judge_nodes(tokens: Sequence[int], parents: Sequence[int], committed: Sequence[int]) -> list[tuple[int, bool]]: ...
def count_sources(
    tokens: Sequence[int],
    parents: Sequence[int],
    sources: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    accepted: Sequence[int],
) -> list[tuple[str, int, list[int]]]: ...
def read_strings(data: bytes, most: int) -> tuple: ...
def checksum(data: Tensor) -> int: ...
def num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...
def instruction_set() -> str: ...
def set_instruction_set(name: str) -> None: ...
def set_programmatic_launch(enabled: bool) -> None: ...  # only in builds with CUDA

MATCHED: int
DEEPEST: int
CONTINUATION_KINDS: int
LONGEST_MATCH: int
PAGE_SIZE: int
MAX_NODES: int
MOST_FUSED_ROWS: int
MAX_CANDIDATES: int
PANEL: int
BLOCK: int
ROW_BLOCK_BYTES: int
BLOCK_FORMATS: dict[str, tuple[int, int, int]]
VOCABULARY_PART: int
MAX_LEVEL_CHILDREN: int
NOISE_BLOCK: int
LINEAR_VARIANTS: tuple[tuple[int, int], ...]
ROW_STATE_WORDS: int
WEIGHT_PLANES: int
NO_DRAFT: int
NO_ALLOWED: int
instruction_sets: tuple[str, ...]
cuda_architectures: str
compiler: str
