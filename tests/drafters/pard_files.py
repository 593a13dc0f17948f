"""PARD checkpoints of random weights, and a straight-line reading of what they compute."""

import json
import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from specengine.models.checkpoint_base import expected_tensors
from specengine.models.config import ModelConfig
from specengine.models.config_hf import read_model_config

MASK = 318
JSON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "pard_token": MASK,
}
ORDER = (-1, 0, -2)  # hidden states of the target, by transformers' numbers
PARD2 = {"pard2": True, "spd_type": "pard2", "pard2_scale": 0.5, "pard2_target_layers": [*ORDER]}


def pard_state(config=None, seed=5):
    """Tensors of the model."""
    noise = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(config or config_of(JSON))
    return {
        name: 1 + 0.3 * torch.randn(shape, generator=noise)
        if len(shape) == 1
        else torch.randn(shape, generator=noise) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }


def config_of(fields) -> ModelConfig:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return read_model_config(Path(folder))


def warp_state(target_size, seed=6):
    """What PARD-2 has beside the model."""
    noise = torch.Generator().manual_seed(seed)
    columns = len(ORDER) * target_size
    return {"target_proj.weight": torch.randn(JSON["hidden_size"], columns, generator=noise) / math.sqrt(columns)}


def write_pard(folder, warp=None, state=None, **changes):
    """Writes a folder. warp: makes it PARD-2, in torch.save's file."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = JSON | (PARD2 if warp else {}) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )
    save_file(state or pard_state(), folder / "model.safetensors")
    if warp:
        torch.save(warp, folder / "warp_model.bin")
    return folder


class Reading:
    """The model as its authors run it: dense causal attention over all rows, everything anew for every draft."""

    def __init__(self, state, warp=None, scale=0.5):
        self.config = config_of(JSON)
        self.state = {name: tensor.double() for name, tensor in (state | (warp or {})).items()}
        self.scale = scale if warp else 0.0

    def features(self, hidden_states, order=ORDER):
        """Of the target's hidden states, with all layers' inputs and the last one; row t is what token t + 1 gets."""
        layers = hidden_states.at_layers.shape[1] - 1
        states = [*hidden_states.at_layers[:, :layers].unbind(1), hidden_states.last]
        return torch.cat([states[number] for number in order], -1).double()

    def logits(self, tokens, features, length):
        """Logits of `length` tokens behind `tokens`. features: of all positions but the last one's, [len - 1, ..]."""
        x = self.state["model.embed_tokens.weight"][[*tokens, *[MASK] * (length - 1)]]
        if self.scale:
            shifted = torch.cat([torch.zeros(1, features.shape[1]).double(), features[: len(tokens) - 1]])
            shifted = torch.cat([shifted, shifted[-1:].expand(length - 1, -1)])
            x = x + self.scale * (shifted @ self.state["target_proj.weight"].T)
        for layer in range(self.config.num_layers):
            name = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gated = F.silu(self.linear(y, f"{name}.mlp.gate_proj")) * self.linear(y, f"{name}.mlp.up_proj")
            x = x + self.linear(gated, f"{name}.mlp.down_proj")
        return self.linear(self.norm(x, "model.norm"), "lm_head")[-length:]

    def norm(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.state[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.state[f"{name}.weight"].T

    def attention(self, x, name):
        c = self.config
        q, k, v = (self.linear(x, f"{name}.{part}_proj").unflatten(1, (-1, c.head_dim)) for part in "qkv")
        q, k, group = self.rotated(q), self.rotated(k), c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(c.head_dim)
        unseen = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        out = torch.einsum("hts,shd->thd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)
        return self.linear(out.flatten(1), f"{name}.o_proj")

    def rotated(self, x):
        half = self.config.head_dim // 2
        frequencies = JSON["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
