"""A straight-line pass of a hybrid, token by token, from the tensors of a checkpoint."""

import torch
from torch.nn.functional import pad, silu, softplus

from specengine.models.rope import rope_tables


class HybridReference:
    """Computes logits [T, vocab] of one text; a test of readers, written after the models' papers and definitions."""

    def __init__(self, checkpoint):
        self.config = checkpoint.config
        self.tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensors}

    def __call__(self, ids):
        hidden = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(self.config.num_layers):
            prefix, delta = f"model.layers.{layer}.", self.config.layer_gated_delta(layer)
            rows = self.norm(hidden, f"{prefix}input_layernorm")
            mixed = self.attention(rows, f"{prefix}self_attn.") if delta is None else self.delta(rows, prefix, delta)
            hidden = hidden + mixed
            rows = self.norm(hidden, f"{prefix}post_attention_layernorm")
            moe = self.config.layer_moe(layer)
            hidden = hidden + (self.mlp(rows, f"{prefix}mlp") if moe is None else self.moe(rows, f"{prefix}mlp", moe))
        head = "model.embed_tokens" if self.config.tie_embeddings else "lm_head"
        return self.linear(self.norm(hidden, "model.norm"), head)

    def linear(self, rows, name):
        return rows @ self.tensors[f"{name}.weight"].T

    def norm(self, rows, name):
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return rows * scale * self.tensors[f"{name}.weight"]

    def attention(self, rows, prefix):
        c, length = self.config, len(rows)
        q, gate = self.linear(rows, f"{prefix}q_proj").view(length, c.num_heads, 2, c.head_dim).unbind(2)
        k, v = (self.linear(rows, f"{prefix}{x}_proj").view(length, c.num_kv_heads, c.head_dim) for x in "kv")
        q, k = self.rotated(self.norm(q, f"{prefix}q_norm")), self.rotated(self.norm(k, f"{prefix}k_norm"))
        k, v = (each.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / c.head_dim**0.5
        scores += torch.full((length, length), float("-inf")).triu(1)
        heads = torch.einsum("hts,shd->thd", scores.softmax(-1), v) * gate.sigmoid()
        return self.linear(heads.flatten(1), f"{prefix}o_proj")

    def rotated(self, heads):
        cos, sin = (table[:, None] for table in rope_tables(self.config, len(heads)))
        half = self.config.rotated // 2
        low, high, rest = heads.tensor_split((half, 2 * half), -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)

    def delta(self, rows, prefix, d):
        prefix, length = f"{prefix}linear_attn.", len(rows)
        z, b, a = (self.linear(rows, f"{prefix}in_proj_{x}") for x in "zba")
        columns = pad(self.linear(rows, f"{prefix}in_proj_qkv"), (0, 0, 3, 0))
        taps = self.tensors[f"{prefix}conv1d.weight"][:, 0]
        columns = silu(sum(columns[i : i + length] * taps[:, i] for i in range(4)))
        q, k, v = columns.split((d.key_size, d.key_size, d.value_size), -1)
        heads = torch.arange(d.num_value_heads)
        of_key = heads % d.num_key_heads if d.tiled else heads // (d.num_value_heads // d.num_key_heads)
        q, k = (each.view(length, d.num_key_heads, d.key_head_dim)[:, of_key] for each in (q, k))
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        v = v.view(length, d.num_value_heads, d.value_head_dim)
        decay = (self.tensors[f"{prefix}decay"] * softplus(a + self.tensors[f"{prefix}dt_bias"])).exp()
        state, out = torch.zeros(d.num_value_heads, d.key_head_dim, d.value_head_dim), []
        for t in range(length):
            state = state * decay[t, :, None, None]
            change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * b[t].sigmoid()[:, None]
            state = state + k[t, :, :, None] * change[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, q[t]) / d.key_head_dim**0.5)
        mixed = self.norm(torch.stack(out), f"{prefix}norm") * silu(z).view(length, d.num_value_heads, -1)
        return self.linear(mixed.flatten(1), f"{prefix}out_proj")

    def mlp(self, rows, prefix):
        gate, up = (self.linear(rows, f"{prefix}.{x}_proj") for x in ("gate", "up"))
        return self.linear(silu(gate) * up, f"{prefix}.down_proj")

    def moe(self, rows, prefix, moe):
        weights = self.linear(rows, f"{prefix}.gate").softmax(-1)
        best, chosen = weights.topk(moe.experts_per_token)
        best = best / best.sum(-1, keepdim=True) if moe.renormalise else best
        kept = torch.zeros_like(weights).scatter(1, chosen, best)
        routed = sum(kept[:, e : e + 1] * self.mlp(rows, f"{prefix}.experts.{e}") for e in range(moe.num_experts))
        shared = self.mlp(rows, f"{prefix}.shared_expert")
        return routed + self.linear(rows, f"{prefix}.shared_expert_gate").sigmoid() * shared
