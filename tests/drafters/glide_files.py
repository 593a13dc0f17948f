"""A GLIDE drafter's folder."""

import json

import torch
from safetensors.torch import save_file

JSON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "large_hidden_size": 64,
    "large_num_attention_heads": 4,
    "large_head_dim": 16,
    "block_size": 5,
}


def glide_state(config=JSON, own=True, d2t=None, seed=0):
    """Random weights under the published names; own: with embedding and head."""
    generator, size, heads = torch.Generator().manual_seed(seed), config["hidden_size"], 64
    inner, width = config["intermediate_size"], config["hidden_size"] // config["num_attention_heads"]

    def draw(rows, columns):
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    state = {"model.norm.weight": 1 + 0.1 * torch.randn(size, generator=generator)}
    for i in range(config["num_hidden_layers"]):
        prefix, keys = f"model.layers.{i}", config["num_key_value_heads"] * width
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}.{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)
        for name, rows in (("q", size), ("k", keys), ("v", keys), ("o", size)):
            state[f"{prefix}.self_attn.{name}_proj.weight"] = draw(rows, size)
        state[f"{prefix}.cross_attn.q_proj.weight"] = 2 * draw(heads, size)
        state[f"{prefix}.cross_attn.o_proj.weight"] = 2 * draw(size, heads)
        for name, rows, columns in (("gate", inner, size), ("up", inner, size), ("down", size, inner)):
            state[f"{prefix}.mlp.{name}_proj.weight"] = draw(rows, columns)
    if own:
        state["model.embed_tokens.weight"] = draw(config["vocab_size"], size)
        state["lm_head.weight"] = 4 * draw(config["vocab_size"] if d2t is None else len(d2t), size)
    if d2t is not None:
        state["d2t"] = d2t
    return state


def write(folder, state, config=JSON):
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
