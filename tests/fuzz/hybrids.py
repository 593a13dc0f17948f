"""Harnesses: folders and GGUF files of hybrids of gated delta rule and attention."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import save

from specengine.drafters.mtp.gguf import gguf_mtp
from specengine.models.checkpoint import RandomCheckpoint, open_checkpoint
from specengine.models.checkpoint_base import expected_tensors
from specengine.models.config import MoeConfig
from specengine.models.config_hf import config_from_hf
from specengine.models.rope import rope_tables
from tests.fuzz import seeds
from tests.fuzz.contract import Harness
from tests.fuzz.mutations import damaged_bytes, damaged_json, damaged_safetensors
from tests.models.hybrid_files import write_hybrid_gguf

JSON = 64  # bytes of Python's objects per byte of text
_SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
_CONFIGS = {
    "qwen3_5": {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": _SIZES},
    "qwen3_next": {
        **_SIZES,
        "architectures": ["Qwen3NextForCausalLM"],
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def _config(family: str) -> bytes:
    return json.dumps(_CONFIGS[family]).encode()


@lru_cache
def _tensors(family: str) -> bytes:
    """The tensors under this project's names, but those that Qwen3-Next's files join."""
    shapes = expected_tensors(config_from_hf(_CONFIGS[family]))
    state = {name.replace("decay", "A_log"): torch.ones(shape) for name, shape in shapes.items()}
    if family == "qwen3_next":
        for name in [name for name in state if "in_proj_qkv" in name or "in_proj_b" in name]:
            first, second, joined = ("qkv", "z", "qkvz") if "qkv" in name else ("b", "a", "ba")
            other = name.replace(f"in_proj_{first}.", f"in_proj_{second}.")
            rows = torch.cat([state.pop(name), state.pop(other)])
            state[name.replace(f"in_proj_{first}.", f"in_proj_{joined}.")] = rows
    return save(state)


def _write_gguf(path: Path, moe: MoeConfig | None, drafted: bool) -> None:
    """drafted: with a block of a drafter, and flags of the layers that have states."""
    config = config_from_hf(_CONFIGS["qwen3_5"])
    if drafted:
        assert config.gated_delta is not None
        config = replace(config, gated_delta=replace(config.gated_delta, layers=frozenset({1})))
    if moe is not None:
        config = replace(config, architecture="qwen3_5_moe", intermediate_size=moe.intermediate_size, moe=moe)
    extra = [(f"blk.{config.num_layers}.nextn.eh_proj.weight", torch.ones(32, 64))] if drafted else []
    write_hybrid_gguf(path, RandomCheckpoint(config), extra, fused=drafted)


@lru_cache
def _gguf_files() -> list[bytes]:
    moe = MoeConfig(3, 2, 16, shared_size=16, shared_gate=True)
    kinds = ((None, False), (None, True), (moe, False), (moe, True))
    return [seeds.written(partial(_write_gguf, moe=each, drafted=drafted)) for each, drafted in kinds]


def _read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    rope_tables(checkpoint.config, min(16, checkpoint.config.max_position))
    for name, shape in expected_tensors(checkpoint.config).items():
        assert checkpoint.read_rows(name, 0, min(2, shape[0])).shape[1:] == shape[1:]


def _read_gguf(path: Path) -> None:
    _read(path)
    drafter = gguf_mtp(path)
    for name, info in () if drafter is None else drafter.tensors.items():
        drafter.read_rows(name, 0, min(2, info.shape[0]))


def _damaged_tensors(path: Path, family: str) -> None:
    (path.parent / "config.json").write_bytes(_config(family))
    _read(path.parent)


def _damaged_config(path: Path) -> None:
    family = "qwen3_next" if b"Next" in path.read_bytes() else "qwen3_5"
    (path.parent / "model.safetensors").write_bytes(_tensors(family))
    _read(path.parent)


HARNESSES = (
    Harness("hybrids' gguf", _gguf_files, _read_gguf, ("hybrid",), "hybrid.gguf", damaged_bytes, JSON),
    *(
        Harness(
            f"{family} weights",
            lambda family=family: [_tensors(family)],
            partial(_damaged_tensors, family=family),
            ("hybrid",),
            f"hybrid-{family}/model.safetensors",
            damaged_safetensors,
            JSON,
        )
        for family in _CONFIGS
    ),
    Harness(
        "hybrids' config",
        lambda: [_config(family) for family in _CONFIGS],
        _damaged_config,
        ("hybrid",),
        "hybrid-config/config.json",
        damaged_json,
        JSON,
    ),
)
