"""Published model shapes, and tiny ones for tests, for checkpoints of random weights (`random:<preset>`)."""

from __future__ import annotations

from dataclasses import replace

from specengine.models.config import ModelConfig, RopeConfig

_LLAMA3_ENDS = (128001, 128008, 128009)
_QWEN_ENDS = (151645, 151643)


def _llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig(500000.0, "llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


_TINY = ModelConfig(
    architecture="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=512,
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="float32",
)

PRESETS: dict[str, ModelConfig] = {
    "llama-3.1-8b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position=131072,
        rope=_llama3_rope(8.0),
        bos_token_id=128000,
        eos_token_ids=_LLAMA3_ENDS,
        dtype="bfloat16",
    ),
    "llama-3.2-1b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position=131072,
        rope=_llama3_rope(32.0),
        tie_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=_LLAMA3_ENDS,
        dtype="bfloat16",
    ),
    "llama-2-7b": ModelConfig(
        architecture="llama",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position=4096,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="float16",
    ),
    # Vicuna v1.3: published draft heads were trained for it
    "vicuna-13b": ModelConfig(
        architecture="llama",
        vocab_size=32000,
        hidden_size=5120,
        intermediate_size=13824,
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position=2048,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="float16",
    ),
    "qwen3-8b": ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position=40960,
        rope=RopeConfig(1000000.0),
        qk_norm=True,
        bos_token_id=151643,
        eos_token_ids=_QWEN_ENDS,
        dtype="bfloat16",
    ),
    "qwen2.5-0.5b": ModelConfig(
        architecture="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        max_position=32768,
        rope=RopeConfig(1000000.0),
        qkv_bias=True,
        tie_embeddings=True,
        bos_token_id=151643,
        eos_token_ids=_QWEN_ENDS,
        dtype="bfloat16",
    ),
    "qwen2.5-7b": ModelConfig(
        architecture="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position=32768,
        rope=RopeConfig(1000000.0),
        qkv_bias=True,
        bos_token_id=151643,
        eos_token_ids=_QWEN_ENDS,
        dtype="bfloat16",
    ),
    "tiny-llama": _TINY,
    "tiny-llama3": replace(
        _TINY, vocab_size=512, num_layers=3, rope=RopeConfig(10000.0, "llama3", 8.0, 64), tie_embeddings=True
    ),
    "tiny-qwen2": replace(_TINY, architecture="qwen2", qkv_bias=True, tie_embeddings=True),
    "tiny-qwen3": replace(_TINY, architecture="qwen3", head_dim=32, qk_norm=True, num_layers=3),
    "tiny-mistral": replace(
        _TINY, architecture="mistral", vocab_size=260, sliding_window=16, sliding_layers=(True, True)
    ),
}
