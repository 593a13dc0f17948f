"""Harnesses: folders of mixtures of experts, in the layouts that their files have."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import save

from specengine.models.checkpoint import expected_tensors, open_checkpoint
from tests.fuzz import seeds
from tests.fuzz.contract import Harness
from tests.fuzz.mutations import damaged_json, damaged_safetensors

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


def _damaged_tensors(path: Path, family: str) -> None:
    (path.parent / "config.json").write_bytes(_config(family))
    _read(path.parent)


def _damaged_config(path: Path) -> None:
    family = "mixtral" if b"Mixtral" in path.read_bytes() else "qwen2_moe"
    (path.parent / "model.safetensors").write_bytes(_tensors(family))
    _read(path.parent)


HARNESSES = (
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
