"""The configuration of a LLaMA-shaped transformer."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from specengine.utils.gated_delta_config import GatedDeltaConfig
from specengine.utils.multipliers import PLAIN, Multipliers

ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "granite"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next"),
)
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position",
)

_IMPOSSIBLE = 1 << 40  # a size that only a damaged file has
MOST_EXPERTS, MOST_PER_TOKEN = 1024, 32  # of the kernels, csrc/ops/experts/experts.h


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base, scaling kind and every parameter of the supported kinds.

    Raises ValueError for an impossible combination.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None  # llama3 and yarn: the length of pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn, as the five fields below
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None  # in place of the factor that mscale or `factor` gives
    truncate: bool = True
    freq_divisors: tuple[float, ...] = ()  # [head_dim / 2] from a GGUF's rope_freqs.weight; empty means none
    attn_factor: float = 1.0  # yarn: multiplies the factor that mscale or `factor` gives
    extrapolation_factor: float = 1.0  # yarn: multiplies the share of the unscaled frequency

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind {self.kind!r} is not supported; expected {', '.join(ROPE_KINDS)}")
        positive = ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attn_factor")
        for name in positive:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"rope {name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.extrapolation_factor < float("inf"):
            raise ValueError(f"rope extrapolation_factor must be 0 or positive, got {self.extrapolation_factor}")
        if self.attention_factor is not None and self.attn_factor != 1:
            raise ValueError("rope attn_factor multiplies what attention_factor replaces; expected one of them")
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if not isfinite(getattr(self, name) or 0.0):
                raise ValueError(f"rope {name} must be finite, got {getattr(self, name)}")
        if self.kind in ("llama3", "yarn") and not 0 < (self.original_max_position or 0) < 2**31:
            raise ValueError(f"rope kind {self.kind!r} needs an original_max_position from 1 to 2^31 - 1")
        if self.kind == "yarn" and self.theta == 1:  # its ramp divides by log(theta)
            raise ValueError("rope kind 'yarn' needs a theta other than 1")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError("rope low_freq_factor must be below high_freq_factor")
        if any(not divisor > 0 for divisor in self.freq_divisors):
            raise ValueError("rope freq_divisors must be positive")


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: sizes and routing.

    intermediate_size: of one expert.  renormalise: weights are a softmax over the logits of the chosen experts;
    otherwise over those of all experts.  shared_size: intermediate size of the shared expert, 0 for none.
    shared_gate: whether a gate scales the shared expert.  dense_layers: layers with an MLP in place of experts.
    swiglu_limit: 0 for silu(gate) * up; otherwise gate and up are clamped, see ops.layer.clamped_swiglu.
    Raises ValueError for an impossible combination.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool = True
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    router_bias: bool = False
    expert_bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.num_experts <= MOST_EXPERTS:
            raise ValueError(f"num_experts must be from 1 to {MOST_EXPERTS}, got {self.num_experts}")
        most = min(self.num_experts, MOST_PER_TOKEN)
        if not 0 < self.experts_per_token <= most:
            raise ValueError(f"num_experts_per_tok must be from 1 to {most}, got {self.experts_per_token}")
        if not 0 < self.intermediate_size < _IMPOSSIBLE:
            raise ValueError(f"the experts' intermediate size must be positive, got {self.intermediate_size}")
        if not 0 <= self.shared_size < _IMPOSSIBLE:
            raise ValueError(f"the shared expert's intermediate size must be 0 or positive, got {self.shared_size}")
        for name in ("swiglu_limit", "swiglu_alpha"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or positive, and finite, got {getattr(self, name)}")


@dataclass(frozen=True)
class ModelConfig:
    """One LLaMA-shaped transformer: sizes, options and special tokens.

    With a sliding window w, a token at position i of a sliding layer sees positions i - w + 1 to i.
    attention_sinks: each head has a score that takes part in the softmax of attention and has no value.
    gated_delta: the layers of gated delta rule; all others have attention.  rotary_dim: the rotated components of a
    head, its first ones.  attention_gate: each head of q is followed by a gate, whose sigmoid multiplies its output.
    Raises ValueError for an impossible combination.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False  # one norm over all heads of a row (OLMoE), not one for each head
    attention_sinks: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()  # one flag per layer, or empty when no layer slides
    moe: MoeConfig | None = None
    gated_delta: GatedDeltaConfig | None = None
    attention_gate: bool = False
    rotary_dim: int | None = None  # None: the whole head
    multipliers: Multipliers = PLAIN
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # of the checkpoint, for example "bfloat16"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, got {self.architecture!r}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
            if getattr(self, name) >= _IMPOSSIBLE:
                raise ValueError(f"{name} is impossibly large")
        if self.max_position >= 2**31:
            raise ValueError(f"max_position {self.max_position} is impossibly large")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.rotary_dim is not None and not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim must be from 2 to head_dim {self.head_dim}, got {self.rotary_dim}")
        if self.rotated % 2:
            raise ValueError(f"rotary_dim must be even, got {self.rotary_dim}")
        if self.gated_delta is not None and not self.gated_delta.layers <= set(range(self.num_layers)):
            raise ValueError(f"layers of gated delta rule must be below num_layers {self.num_layers}")
        if not self.attention_layers:
            raise ValueError("layer_types must name at least one layer with attention")
        if self.rope.kind == "dynamic" and self.head_dim <= 2:
            raise ValueError(f"dynamic rope needs head_dim above 2, got {self.head_dim}")
        if self.rope.freq_divisors and len(self.rope.freq_divisors) != self.rotated // 2:
            raise ValueError(
                f"rope freq_divisors must have half of the rotated components, {self.rotated // 2} entries, "
                f"got {len(self.rope.freq_divisors)}"
            )
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"sliding_window must be positive, got {self.sliding_window}")
        if any(self.sliding_layers) != (self.sliding_window is not None):
            raise ValueError("sliding_window and sliding_layers must be given together")
        if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
            raise ValueError(f"sliding_layers must have {self.num_layers} entries, got {len(self.sliding_layers)}")

    @property
    def rotated(self) -> int:
        """Leading components of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def attention_layers(self) -> int:
        """How many layers have attention, and with it keys and values in the cache."""
        return self.num_layers - (0 if self.gated_delta is None else len(self.gated_delta.layers))

    def layer_gated_delta(self, layer: int) -> GatedDeltaConfig | None:
        """Returns the gated delta rule of one layer; None for a layer of attention."""
        return self.gated_delta if self.gated_delta is not None and layer in self.gated_delta.layers else None

    def layer_moe(self, layer: int) -> MoeConfig | None:
        """Returns the experts of one layer; None for a dense one."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens, the token itself included; None means full attention."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None


def check_layers(num_layers: int) -> int:
    """Raises ValueError for an impossible layer count, before a damaged file makes a loop run over its layers."""
    if not 0 < num_layers <= 10_000:
        raise ValueError(f"num_layers must be from 1 to 10000, got {num_layers}")
    return num_layers
