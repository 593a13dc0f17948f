"""Random blocks of GGUF types: every byte is legal but for scales that must be finite."""

import gguf
import numpy as np

Type = gguf.GGMLQuantizationType
# bytes of the half-float scales of a block
_HALVES = {
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "MXFP4": (),
    "NVFP4": (),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
CODED = ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "Q3_K", "Q2_K")
GRIDS = tuple(kind for kind in _HALVES if kind not in CODED)


def random_blocks(kind: str, shape: tuple[int, int], scale: float = 0.02, seed: int = 0) -> np.ndarray:
    """Stored rows uint8 [R, row_bytes] of a weight of this shape."""
    size, block_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // size, block_bytes), dtype=np.uint8)
    for at in _HALVES[kind]:
        half = rng.uniform(0.5, 1, len(blocks)).astype(np.float16) * np.float16(scale / 32)
        blocks[:, at : at + 2] = half[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(117, 122, len(blocks))
    if kind == "NVFP4":
        blocks[:, :4] = rng.integers(0, 40, (len(blocks), 4))
    if kind == "IQ1_M":  # its half-float lies in the top bits of the last four pairs of bytes
        tops = np.array([0x0, 0x1, 0x1, 0x1], np.uint8)
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | tops << 4
    return blocks.reshape(shape[0], -1)
