"""Small intact files for the fuzzers to begin with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import save

from specengine.models.presets import PRESETS
from tests.models.files import random_state
from tests.models.gguf_blocks import CODED, GRIDS, random_blocks
from tests.models.gguf_files import Type, rewrite_gguf, split_gguf, write_gguf

TINY = replace(
    PRESETS["tiny-llama"],
    vocab_size=40,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position=64,
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": TINY.vocab_size,
    "hidden_size": TINY.hidden_size,
    "intermediate_size": TINY.intermediate_size,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eos_token_id": [2],
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@lru_cache(maxsize=1)
def state() -> dict[str, torch.Tensor]:
    return random_state(TINY)


def written(write: Callable[[Path], object]) -> bytes:
    """What a function that writes a file of a given path puts there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        return path.read_bytes()


def gguf() -> list[bytes]:
    plain = written(partial(write_gguf, config=TINY, state=state()))
    return [plain, written(_gguf_of_blocks), written(_gguf_of_another_program)]


def _gguf_of_another_program(path: Path) -> None:
    """Writes numbers of every layer, names without an ending, factors of yarn and another network beside."""
    source = path.with_name("source")
    write_gguf(source, TINY, state())
    scaling = {"type": "yarn", "factor": 4.0, "attn_factor": 0.5, "yarn_attn_factor": 0.5, "yarn_ext_factor": 0.5}
    keys = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    keys |= {"llama.attention.head_count_kv": [TINY.num_kv_heads], "llama.feed_forward_length": [32]}
    keys |= {"tokenizer.ggml.eos_token_ids": [2, 3], "llama.vision.block_count": 1}
    rewrite_gguf(source, path, keys, lambda name: name.removesuffix(".weight"), [("v.blk.0", torch.ones(4))])


@lru_cache(maxsize=1)
def gguf_parts() -> tuple[bytes, ...]:
    """The two parts of a split model."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_gguf(Path(folder) / "part.gguf", TINY, state())
        return tuple(path.read_bytes() for path in split_gguf(source, Path(folder), 2))


def _gguf_of_blocks(path: Path) -> None:
    """Writes a model in which each type of blocks has a matrix."""
    config = replace(TINY, hidden_size=256, intermediate_size=256, head_dim=128, num_layers=2)
    values: dict = random_state(config)
    matrices = [name for name in values if values[name].ndim == 2]
    for name, kind in zip(matrices[1:], (*CODED, *GRIDS), strict=True):
        values[name] = (random_blocks(kind, values[name].shape), Type[kind])
    write_gguf(path, config, values)


def safetensors() -> list[bytes]:
    return [
        save(state()),
        save(_as_a_trainer_leaves_it()),
        save({"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}),
    ]


def _as_a_trainer_leaves_it() -> dict[str, torch.Tensor]:
    """float64, names without a prefix, buffers, scales of caches and a head of values."""
    beside = ("layers.0.self_attn.rotary_emb.cos_cached", "layers.0.self_attn.k_scale", "v_head.summary.weight")
    bare = {name.removeprefix("model."): tensor.double() for name, tensor in state().items()}
    return bare | {name: torch.ones(2) for name in beside}


def torch_files() -> list[bytes]:
    turned = {**state(), "lm_head.weight": state()["lm_head.weight"].T.contiguous().T}
    return [written(partial(torch.save, each)) for each in (state(), turned)]


def configs() -> list[bytes]:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.0}
    qwen = {**CONFIG, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 16}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    base = {**CONFIG, "architectures": ["LlamaModel"], "tie_word_embeddings": True}
    scaled = {**yarn, "attention_factor": None, "attn_factor": 0.5, "extrapolation_factor": 0.5}
    every = [CONFIG, {**CONFIG, "rope_scaling": yarn}, qwen, {**CONFIG, "rope_parameters": llama3}]
    every += [{key: value for key, value in base.items() if key != "rms_norm_eps"} | {"rope_scaling": scaled}]
    return [json.dumps(each).encode() for each in every]
