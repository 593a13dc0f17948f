"""GGUF files of mixtures of experts, as converters write them: a tensor for each part of all experts of a layer."""

import gguf
import torch

from specengine.models.checkpoint_base import Checkpoint, TensorInfo
from specengine.utils.multipliers import PLAIN
from tests.models.gguf_files import gguf_arch, write_gguf

NUMBER, REAL, TEXT = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING


def write_moe_gguf(path, config, state, kind=None):
    """Writes any mixture but gpt-oss. kind: of experts' matrices, floats by default."""
    scales = {}
    if config.multipliers != PLAIN:
        scales = {
            "embedding_scale": (config.multipliers.embedding, REAL),
            "attention.scale": (config.multipliers.attention, REAL),
            "residual_scale": (config.multipliers.residual, REAL),
            "logit_scale": (config.multipliers.logits_divisor, REAL),
        }
    gates = {name: value[0] if "shared_expert_gate" in name else value for name, value in state.items()}
    return _write(path, config, gates, kind, scales)


def write_gpt_oss_gguf(path, config, state, kind=None, changes=()):
    """Writes gpt-oss: gate and up apart, rows as they are used. kind: of experts' matrices, floats by default."""
    values = {
        "attention.value_length": (config.head_dim, NUMBER),
        "attention.sliding_window": (config.sliding_window, NUMBER),
        "expert_feed_forward_length": (config.moe.intermediate_size, NUMBER),
        "rope.scaling.type": ("yarn", TEXT),
        "rope.scaling.factor": (config.rope.factor, REAL),
        "rope.scaling.original_context_length": (config.rope.original_max_position, NUMBER),
        **dict(changes),
    }
    return _write(path, config, state, kind, values)


def _write(path, config, state, kind, values):
    merged, rest, extra = {}, {}, []
    for name, value in state.items():
        layer, part = name.split(".")[2:3], name.split(".")[-2:]
        if ".experts." in name:
            merged.setdefault(f"blk.{layer[0]}.ffn_{part[0].removesuffix('_proj')}_exps.{part[1]}", []).append(value)
        elif name.endswith("sinks"):
            extra.append((f"blk.{layer[0]}.attn_sinks.weight", value))
        else:
            rest[name] = value
    for name, matrices in merged.items():
        value = torch.stack(matrices)
        if kind and name.endswith("weight"):
            raw = gguf.GGMLQuantizationType[kind]
            value = gguf.quants.quantize(value.numpy(), raw), raw
        extra.append((name, value))
    counts = {
        "expert_count": (config.moe.num_experts, NUMBER),
        "expert_used_count": (config.moe.experts_per_token, NUMBER),
    }
    arch = gguf.MODEL_ARCH_NAMES[gguf_arch(config)]
    metadata = [(f"{arch}.{key}", *value) for key, value in (counts | values).items()]
    return write_gguf(path, config, rest, metadata, extra)


class FusedExperts(Checkpoint):
    """A state whose experts are in one tensor for each layer and product; it counts the bytes that are read."""

    def __init__(self, config, state):
        self.source, self.config, self.bytes_read = "fused", config, 0
        self.state = {name: tensor for name, tensor in state.items() if ".mlp.experts." not in name}
        numbers = range(config.moe.num_experts)
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}.mlp.experts"
            if f"{prefix}.0.up_proj.weight" not in state:
                continue
            gate, up, down = (
                torch.stack([state[f"{prefix}.{number}.{part}_proj.weight"] for number in numbers])
                for part in ("gate", "up", "down")
            )
            self.state |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
        kind = "float32"
        self.tensors = {name: TensorInfo(tuple(tensor.shape), kind) for name, tensor in self.state.items()}

    def _fill_rows(self, out, name, start, stop):
        out.copy_(self.state[name][start:stop])
        self.bytes_read += out.nbytes
