"""Writes PEFT LoRA folders of random matrices."""

import json

import torch
from safetensors.torch import save_file

from specengine.models.checkpoint_base import expected_tensors
from specengine.models.presets import PRESETS

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_tensors(config, modules=MODULES, rank=4, seed=0, size=0.3, dtype=torch.float32):
    """The tensors of an adapter that changes a model's text; rank: of all modules, or by their ending."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in expected_tensors(config).items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(modules)):
            own = rank if isinstance(rank, int) else next((r for end, r in rank.items() if module.endswith(end)), 4)
            for part, sizes in (("A", (own, shape[1])), ("B", (shape[0], own))):
                values = torch.randn(sizes, generator=generator) * size / shape[1] ** 0.25
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.to(dtype)
    return tensors


def write_adapter(folder, config, *, modules=MODULES, rank=4, seed=0, size=0.3, dtype=torch.float32, **fields):
    """Writes an adapter folder; fields: of adapter_config.json. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(lora_tensors(config, modules, rank, seed, size, dtype), folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank if isinstance(rank, int) else 4, "lora_alpha": 8}
    about |= {"target_modules": list(modules), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def tiny_adapters(folder):
    """Three adapters of tiny-llama, of different ranks and modules, by name."""
    config = PRESETS["tiny-llama"]
    return {
        "a": write_adapter(folder / "a", config, rank=4, seed=1),
        "b": write_adapter(folder / "b", config, rank=20, seed=2, modules=("q_proj", "v_proj", "down_proj")),
        "c": write_adapter(folder / "c", config, rank=1, seed=3, modules=("o_proj", "gate_proj", "up_proj")),
    }
