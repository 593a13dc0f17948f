"""Writes tiny hybrids with transformers, as folders of the Hugging Face layout."""

import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
FAMILIES = {
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {}),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, EXPERTS),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, EXPERTS),
}


def write_hybrid(folder, family, **changes):
    """Writes a random model of a family to a folder; returns it."""
    config_class, model_class, experts = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if not (experts and name == "intermediate_size")}
    model = model_class(config_class(**sizes, **experts, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # transformers initialises norms with their neutral value
            if "norm" in name or "dt_bias" in name:
                parameter.normal_(parameter.mean().item(), 0.2)
            elif parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return model
