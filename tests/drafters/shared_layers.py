"""A draft model made of the target's own layers."""

import json

from safetensors.torch import save_file

from specengine.models.checkpoint import open_checkpoint

TARGET = "random:tiny-llama"


def write_layers(folder, model, layers, **changes):
    """A checkpoint of some of the target's own layers."""
    checkpoint = open_checkpoint(TARGET)
    tensors = {"model.norm.weight": checkpoint.read("model.norm.weight").float()}
    for i, layer in enumerate(layers):
        own = f"model.layers.{layer}."
        tensors |= {
            name.replace(own, f"model.layers.{i}."): checkpoint.read(name).float()
            for name in checkpoint.tensors
            if name.startswith(own)
        }
    c = model.config
    config = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_position,
        "shared_with_target": ["model.embed_tokens.weight", "lm_head.weight"],
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
