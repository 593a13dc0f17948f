"""Harnesses: folders of mixtures of experts, in the layouts that their files have."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import save

from specengine.models.checkpoint import expected_tensors, open_checkpoint
from specengine.models.presets import PRESETS
from specengine.models.rope import rope_tables
from tests.fuzz import seeds
from tests.fuzz.contract import Harness
from tests.fuzz.mutations import damaged_bytes, damaged_json, damaged_safetensors
from tests.models.files import random_state
from tests.models.moe_files import write_gpt_oss_gguf, write_moe_gguf

JSON = 64  # bytes of Python's objects per byte of text
EXPERTS, SIZE, HIDDEN = 3, 16, seeds.TINY.hidden_size
_CONFIGS = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "intermediate_size": SIZE,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": SIZE,
        "shared_expert_intermediate_size": SIZE,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
_MLP = "model.layers.0.mlp"
_BIASES = {"q": 32, "k": 16, "v": 16}


def _config(family: str) -> bytes:
    return json.dumps({**seeds.CONFIG, **_CONFIGS[family]}).encode()


@lru_cache
def _tensors(family: str) -> bytes:
    state = {name: tensor for name, tensor in seeds.state().items() if not name.startswith(_MLP)}
    if family == "mixtral":
        moe = f"{_MLP.removesuffix('.mlp')}.block_sparse_moe"
        state[f"{moe}.gate.weight"] = torch.ones(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for part, shape in (("w1", (SIZE, HIDDEN)), ("w2", (HIDDEN, SIZE)), ("w3", (SIZE, HIDDEN))):
                state[f"{moe}.experts.{expert}.{part}.weight"] = torch.full(shape, float(expert))
    else:
        state[f"{_MLP}.gate.weight"] = torch.ones(EXPERTS, HIDDEN)
        state[f"{_MLP}.experts.gate_up_proj"] = torch.ones(EXPERTS, 2 * SIZE, HIDDEN)
        state[f"{_MLP}.experts.down_proj"] = torch.ones(EXPERTS, HIDDEN, SIZE)
        state[f"{_MLP}.shared_expert_gate.weight"] = torch.ones(1, HIDDEN)
        for part, shape in (("gate", (SIZE, HIDDEN)), ("up", (SIZE, HIDDEN)), ("down", (HIDDEN, SIZE))):
            state[f"{_MLP}.shared_expert.{part}_proj.weight"] = torch.ones(shape)
        state |= {f"model.layers.0.self_attn.{part}_proj.bias": torch.ones(rows) for part, rows in _BIASES.items()}
    return save(state)


def _read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name, shape in expected_tensors(checkpoint.config).items():
        assert checkpoint.read_rows(name, 0, min(2, shape[0])).shape[1:] == shape[1:]


_GGUF_WRITERS = {"qwen2-moe": write_moe_gguf, "granite-moe": write_moe_gguf, "gpt-oss": write_gpt_oss_gguf}


@lru_cache
def _gguf_files() -> list[bytes]:
    return [seeds.written(partial(_write_gguf, preset=preset)) for preset in _GGUF_WRITERS]


def _write_gguf(path: Path, preset: str) -> None:
    config = PRESETS[f"tiny-{preset}"]
    moe = replace(config.moe, num_experts=EXPERTS, experts_per_token=2, dense_layers=frozenset())
    sliding = config.sliding_layers[:1]
    config = replace(config, vocab_size=40, hidden_size=HIDDEN, num_layers=1, moe=moe, sliding_layers=sliding)
    _GGUF_WRITERS[preset](path, config, random_state(config))


def _damaged_gguf(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    rope_tables(checkpoint.config, min(16, checkpoint.config.max_position))
    for name, shape in expected_tensors(checkpoint.config).items():
        assert checkpoint.read_rows(name, 0, min(2, shape[0])).shape[1:] == shape[1:]


def _damaged_tensors(path: Path, family: str) -> None:
    (path.parent / "config.json").write_bytes(_config(family))
    _read(path.parent)


def _damaged_config(path: Path) -> None:
    family = "mixtral" if b"Mixtral" in path.read_bytes() else "qwen2_moe"
    (path.parent / "model.safetensors").write_bytes(_tensors(family))
    _read(path.parent)


HARNESSES = (
    Harness("experts' gguf", _gguf_files, _damaged_gguf, ("mixture",), "mixture.gguf", damaged_bytes, JSON),
    *(
        Harness(
            f"{family} weights",
            lambda family=family: [_tensors(family)],
            partial(_damaged_tensors, family=family),
            ("mixture",),
            f"mixture-{family}/model.safetensors",
            damaged_safetensors,
            JSON,
        )
        for family in _CONFIGS
    ),
    Harness(
        "experts' config",
        lambda: [_config(family) for family in _CONFIGS],
        _damaged_config,
        ("mixture",),
        "mixture-config/config.json",
        damaged_json,
        JSON,
    ),
)
