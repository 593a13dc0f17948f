"""The arithmetic of drafters one position at a time, in float64, as papers and published code define it."""

import math

import torch


class Weights:
    """Tensors by name, as float64; `of("midlayer.")` returns the tensors under a prefix."""

    def __init__(self, tensors, prefix=""):
        self.tensors, self.prefix = tensors, prefix

    def of(self, prefix):
        return Weights(self.tensors, self.prefix + prefix)

    def __call__(self, name):
        return self.tensors[self.prefix + name].detach().double()

    def __contains__(self, name):
        return self.prefix + name in self.tensors


def rms(x, weight, eps):
    return x / math.sqrt(x.square().mean().item() + eps) * weight


def turned(head, position, theta):
    half, out = len(head) // 2, head.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        out[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def heads(x, weight, head_dim):
    return list((weight @ x).split(head_dim))


def attend(queries, seen):
    """Attends. queries: one [D] per head.  seen: (keys, values) per visible position, one [D] per kv head each."""
    out = []
    for i, q in enumerate(queries):
        kv = i * len(seen[0][0]) // len(queries)
        scores = torch.stack([(q @ keys[kv]) / math.sqrt(len(q)) for keys, _ in seen])
        out.append(sum(share * values[kv] for share, (_, values) in zip(scores.softmax(0), seen, strict=True)))
    return torch.cat(out)


def project(x, w, shape, position):
    """Computes queries, keys and values of one row."""
    q, k, v = (heads(x, w(f"self_attn.{name}_proj.weight"), shape.head_dim) for name in "qkv")
    return [turned(h, position, shape.rope_theta) for h in q], [turned(h, position, shape.rope_theta) for h in k], v


def mlp(x, w):
    gate = w("mlp.gate_proj.weight") @ x
    return w("mlp.down_proj.weight") @ (gate * torch.sigmoid(gate) * (w("mlp.up_proj.weight") @ x))


def layer(rows, w, shape, between=lambda t, x: x):
    """Runs a causal decoder layer over rows [C]. between: a function that runs between attention and MLP."""
    out, cache = [], []
    for t, x in enumerate(rows):
        normed = rms(x, w("input_layernorm.weight"), shape.rms_norm_eps) if "input_layernorm.weight" in w else x
        q, k, v = project(normed, w, shape, t)
        cache.append((k, v))
        x = between(t, x + w("self_attn.o_proj.weight") @ attend(q, cache))
        out.append(x + mlp(rms(x, w("post_attention_layernorm.weight"), shape.rms_norm_eps), w))
    return out


def soft_entropy(target_state, state, target_head, head):
    """Computes the cross-entropy of one row between two softmaxes."""
    truth = (target_head.double() @ target_state.double()).softmax(0)
    return -(truth * (head.double() @ state).log_softmax(0)).sum()
