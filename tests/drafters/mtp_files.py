"""MTP tensors of random weights for any target, and a straight-line reading of what they compute."""

import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from specengine.models.checkpoint_base import layer_tensors

LAYER = "mtp.layers.0"


def mtp_state(config, moe=None):
    """Tensors as Qwen's files have them: norms are stored less one."""
    hidden = config.hidden_size
    shapes = {"mtp.fc.weight": (hidden, 2 * hidden)} | layer_tensors(config, f"{LAYER}.", moe)
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return {
        name: torch.randn(shape) * (0.2 if len(shape) == 1 else 1 / math.sqrt(shape[-1]))
        for name, shape in shapes.items()
    }


def write_mtp(folder, state):
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    return folder


def converted(state, block, kind=None):
    """The same as block `block` of a GGUF file, by the steps of llama.cpp's converter. kind: a GGUF type."""
    own = {
        "mtp.fc": "eh_proj",
        "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm",
        "mtp.norm": "shared_head.norm",
    }
    import gguf  # here: a machine with a GPU may lack it

    archs = gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE, gguf.MODEL_ARCH.GLM4_MOE  # the last has names of nextn
    maps = [gguf.get_tensor_name_map(arch, block + 1) for arch in archs]
    found, experts = {}, {}
    for name, value in state.items():
        stem = own.get(name.removesuffix(".weight"), name.removeprefix(f"{LAYER}."))
        name = f"model.layers.{block}.{stem.removesuffix('.weight')}.weight"
        if ".experts." in name:
            number, part = stem.split(".")[2:4]
            experts.setdefault(f"blk.{block}.ffn_{part.removesuffix('_proj')}_exps.weight", {})[int(number)] = value
            continue
        value = value + 1 if name.endswith("norm.weight") else value
        value = value[0] if name.endswith("shared_expert_gate.weight") else value
        found[next(filter(None, (each.get_name(name, (".weight",)) for each in maps)))] = value
    found |= {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}
    floats = "ffn_gate_inp.weight"  # of the router
    return [(name, x) if kind is None or x.ndim < 2 or floats in name else (name, x, kind) for name, x in found.items()]


class Reading:
    """The network as its model's authors have it: dense attention over all rows, everything anew for every token.

    embedding, head: of the target, float32 [V, hidden].
    """

    def __init__(self, config, state, embedding, head):
        self.config, self.state = config, {name: tensor.double() for name, tensor in state.items()}
        self.embedding, self.head = embedding.double(), head.double()

    def logits(self, hidden_states, tokens):
        """Logits after the last of `tokens`, which follow hidden states of the target; deeper rows read outputs."""
        rows = list(hidden_states.double())
        for count in range(len(rows), len(tokens) + 1):
            rows.append(self.outputs(torch.stack(rows), torch.tensor(tokens[:count]))[-1])
        return self.head @ rows[-1]

    def chain(self, hidden_states, tokens, length):
        """The likeliest token after `tokens`, the likeliest one after that, and so on."""
        drafted = []
        for _ in range(length):
            drafted.append(self.logits(hidden_states, [*tokens, *drafted]).argmax().item())
        return drafted

    def outputs(self, x, tokens):
        halves = self.norm(self.embedding[tokens], "mtp.pre_fc_norm_embedding"), self.norm(x, "mtp.pre_fc_norm_hidden")
        x = torch.cat(halves, -1) @ self.state["mtp.fc.weight"].T
        x = x + self.attention(self.norm(x, f"{LAYER}.input_layernorm"))
        x = x + self.experts(self.norm(x, f"{LAYER}.post_attention_layernorm"))
        return self.norm(x, "mtp.norm")

    def norm(self, x, name):
        rms = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return x / rms * (1 + self.state[f"{name}.weight"])

    def linear(self, x, name):
        return F.linear(x, self.state[f"{LAYER}.{name}.weight"], self.state.get(f"{LAYER}.{name}.bias"))

    def attention(self, x):
        c = self.config
        q, k, v = (self.linear(x, f"self_attn.{part}_proj") for part in "qkv")
        q, k, v = q.unflatten(1, (c.num_heads, -1)), k.unflatten(1, (-1, c.head_dim)), v.unflatten(1, (-1, c.head_dim))
        q, gate = q[..., : c.head_dim], q[..., c.head_dim :]
        if c.qk_norm:
            q, k = self.norm(q, f"{LAYER}.self_attn.q_norm"), self.norm(k, f"{LAYER}.self_attn.k_norm")
        q, k, group = self.rotated(q), self.rotated(k), c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(c.head_dim)
        unseen = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        out = torch.einsum("hts,shd->thd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)
        out = out * gate.sigmoid() if c.attention_gate else out
        return self.linear(out.flatten(1), "self_attn.o_proj")

    def rotated(self, x):
        turned = self.config.rotated
        frequencies = self.config.rope.theta ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        angles = (torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies)[:, None]
        (a, b), rest = x[..., :turned].chunk(2, -1), x[..., turned:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    def mlp(self, x, name):
        return self.linear(
            F.silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def experts(self, x):
        moe = self.config.moe
        if f"{LAYER}.mlp.gate.weight" not in self.state:
            return self.mlp(x, "mlp")
        logits = self.linear(x, "mlp.gate")
        best = logits.topk(moe.experts_per_token)
        weights = best.values.softmax(-1) if moe.renormalise else logits.softmax(-1).gather(1, best.indices)
        rows = []
        for row, own, chosen in zip(x, weights, best.indices, strict=True):
            rows.append(sum(w * self.mlp(row, f"mlp.experts.{e}") for w, e in zip(own, chosen.tolist(), strict=True)))
        shared = self.mlp(x, "mlp.shared_expert") if moe.shared_size else 0
        return (
            torch.stack(rows) + (self.linear(x, "mlp.shared_expert_gate").sigmoid() if moe.shared_gate else 1) * shared
        )
