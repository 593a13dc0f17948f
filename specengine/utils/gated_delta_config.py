"""The configuration of layers of gated delta rule, which hybrid models have beside layers of attention."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_HEADS, _MOST_DIM = 1 << 12, 1 << 10
CONV_WIDTH = 4  # of all published models; the kernels know no other


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Sizes of the layers of gated delta rule (Yang et al. 2024), and which layers these are.

    tiled: value head j reads the query and key of key head j % num_key_heads, as GGUF files order them; otherwise of
    j // (num_value_heads / num_key_heads).
    Raises ValueError for an impossible combination.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    tiled: bool = False

    def __post_init__(self) -> None:
        for name, most in (
            ("num_key_heads", _MOST_HEADS),
            ("num_value_heads", _MOST_HEADS),
            ("key_head_dim", _MOST_DIM),
            ("value_head_dim", _MOST_DIM),
        ):
            if not 0 < getattr(self, name) <= most:
                raise ValueError(f"linear {name} must be from 1 to {most}, got {getattr(self, name)}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear num_value_heads {self.num_value_heads} must be a multiple of num_key_heads "
                f"{self.num_key_heads}"
            )

    @property
    def key_size(self) -> int:
        """Rows of q, and of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Rows of v, and of z."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, those of q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def state_floats(self) -> int:
        """Floats of one layer's state: the matrices of its heads, and the last inputs of its convolution."""
        matrices = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return matrices + (CONV_WIDTH - 1) * self.conv_channels

    @property
    def record_floats(self) -> int:
        """Floats that a row of a pass leaves for the replay of one layer."""
        return 2 * self.conv_channels + 2 * self.num_value_heads

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Names and shapes of a layer's projections; all but the last make the columns of its rows, in this order."""
        return {
            "in_proj_qkv": (self.conv_channels, hidden),
            "in_proj_z": (self.value_size, hidden),
            "in_proj_b": (self.num_value_heads, hidden),
            "in_proj_a": (self.num_value_heads, hidden),
            "out_proj": (hidden, self.value_size),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a layer's other tensors; decay is -exp(A_log)."""
        return {
            "conv1d.weight": (self.conv_channels, 1, CONV_WIDTH),
            "decay": (self.num_value_heads,),
            "dt_bias": (self.num_value_heads,),
            "norm.weight": (self.value_head_dim,),
        }
