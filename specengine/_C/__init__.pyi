# The native core, in the order of csrc/bindings.cpp.
from collections.abc import Sequence

from torch import Tensor

# weights
def pack_linear(rows: Tensor, packed: Tensor, first: int) -> None: ...
def pack_blocks(rows: Tensor, packed: Tensor, first: int, type: str) -> None: ...

# target forward
def gather_rows(weight: Tensor, ids: Tensor, out: Tensor) -> None: ...
def quantise_rows(x: Tensor, out: Tensor) -> None: ...
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, first: int, rows: int, variant: int = 0
) -> None: ...
def linear_argmax(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, keys: Tensor, rows: int, variant: int = 0
) -> None: ...
def rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None: ...
def silu_mul(gate_up: Tensor, out: Tensor) -> None: ...
def rope_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    depths: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    row_start: Tensor,
    q: Tensor,
    eps: float,
    first_node: int = 0,
) -> None: ...
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    row_start: Tensor,
    ancestors: Tensor | None,
    out: Tensor,
    scale: float,
    window: int,
    strict: bool,
    workspace: Tensor | None,
    first_node: int = 0,
) -> None: ...
def tree_attention_workspace(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    row_start: Tensor,
    ancestors: Tensor | None,
    out: Tensor,
    scale: float,
    window: int,
    strict: bool,
) -> int: ...

class Projection:
    def __init__(self, weights: Sequence[Tensor], rows: Sequence[int], bias: Tensor | None) -> None: ...

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
    ) -> None: ...
    def workspace_bytes(self, rows: int) -> int: ...

def decoder_pass(
    decoder: Decoder,
    tokens: Tensor | None,
    inputs: Tensor | None,
    first_inputs: Tensor | None,
    depths: Tensor,
    ancestors: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    row_start: Tensor,
    cos: Tensor,
    sin: Tensor,
    hidden_states: Tensor | None,
    at_layers: Tensor | None,
    workspace: Tensor,
    first_node: int = 0,
) -> None: ...

# draft
def expand_backbone(
    logits: Tensor,
    root: Tensor,
    thresholds: Tensor,
    widths: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    scores: Tensor,
    ancestors: Tensor,
    node_counts: Tensor,
    top_tokens: Tensor,
    top_scores: Tensor,
    sums: Tensor,
    arrived: Tensor,
) -> None: ...
def draft_backbone(
    decoder: Decoder,
    embedding: Tensor,
    embedding_norm: Tensor,
    feature_norm: Tensor,
    fuse: Projection | None,
    before_residual: bool,
    feed_back: bool,
    head: Projection,
    vocabulary: Tensor | None,
    tokens: Tensor,
    hidden_states: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    row_start: Tensor,
    cos: Tensor,
    sin: Tensor,
    least: float,
    children: Tensor,
    scores: Tensor,
    levels: Tensor,
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
    sequences: Tensor,
    nodes: Tensor,
    index: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    row_start: Tensor,
    sampling: Sequence[Tensor],
    history: Sequence[Tensor],
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

# verify and accept
def verify_tree(
    logits: Tensor | None,
    drawn: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    row_start: Tensor,
    sampling: Sequence[Tensor],
    history: Sequence[Tensor],
    draft_logits: Tensor | None,
    draft_rows: Tensor | None,
    draft_index: Tensor | None,
    replacement: bool,
    path: Tensor,
    path_length: Tensor,
    bonus: Tensor,
    relaxed: Tensor,
    scores: Tensor,
    counts: Tensor,
    row_states: Tensor | None,
    weights: Tensor | None,
    rule: str,
    options: Sequence[float],
) -> None: ...
def commit_tokens(
    tokens: Tensor,
    parents: Tensor,
    path: Tensor,
    path_length: Tensor,
    bonus: Tensor,
    relaxed: Tensor,
    eos: Tensor,
    ignores_eos: Tensor,
    final_length: Tensor,
    history: Tensor,
    history_length: Tensor,
    active: Tensor,
    record: Tensor,
) -> None: ...

# compact
def compact_kv(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lengths: Tensor, path: Tensor, path_length: Tensor
) -> None: ...

# what drafters without weights remember
MATCHED: int
DEEPEST: int
CONTINUATION_KINDS: int

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

def sort_suffixes(tokens: Tensor, order: Tensor) -> None: ...

class TextCorpus:
    def __init__(self, tokens: Tensor, order: Tensor) -> None: ...
    def continuations(
        self, context: Sequence[int], nodes: int, deepest: int, width: int, rates: Sequence[float], least: float
    ) -> tuple[list[int], list[int], list[int]]: ...
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

# the build and the machine
PAGE_SIZE: int
MAX_NODES: int
MAX_CANDIDATES: int
PANEL: int
BLOCK: int
ROW_BLOCK_BYTES: int
Q8_BYTES: int
Q4_BYTES: int
Q4_MIN_BYTES: int
VOCABULARY_PART: int
NOISE_BLOCK: int
LINEAR_VARIANTS: tuple[tuple[int, int], ...]
ROW_STATE_WORDS: int
WEIGHT_PLANES: int

def num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...

instruction_sets: tuple[str, ...]

def instruction_set() -> str: ...
def set_instruction_set(name: str, /) -> None: ...
def set_programmatic_launch(enabled: bool) -> None: ...  # where CUDA was compiled

cuda_architectures: str
compiler: str
