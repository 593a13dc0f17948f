"""One-pass block drafters of random weights in every published layout, and a straight-line reading of each."""

import json
import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, MASK, BLOCK = 64, 4, 2, 16, 96, 320, 319, 6
RANK, GRU, WIDE = 8, 24, 16  # of Markov heads and selectors; of Domino
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
}
GROUP = {"mask_token_id": MASK, "target_layer_ids": [-1, 0]}
DFLASH = SIZES | {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": GROUP}
JETSPEC = DFLASH | {"dflash_config": GROUP | {"causal_head": True}}


def draw(*shape, scale=None):
    return torch.randn(*shape) * (scale or 1 / math.sqrt(shape[-1]))


def norm(*shape):
    return 1 + draw(*shape, scale=0.2)


def backbone_state(config, *, bias=False, features=2):
    """fc, norms and layers, as z-lab names them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    state = {
        "fc.weight": draw(hidden, features * HIDDEN),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    sizes = {
        "self_attn.q_proj": (HEADS * DIM, hidden),
        "self_attn.k_proj": (KV_HEADS * DIM, hidden),
        "self_attn.v_proj": (KV_HEADS * DIM, hidden),
        "self_attn.o_proj": (hidden, HEADS * DIM),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for number in range(config["num_hidden_layers"]):
        prefix = f"layers.{number}."
        state |= {f"{prefix}{name}.weight": draw(*shape) for name, shape in sizes.items()}
        state |= {f"{prefix}{name}.weight": norm(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        state |= {f"{prefix}self_attn.{name}.weight": norm(DIM) for name in ("q_norm", "k_norm")}
        if bias:
            names = [name for name in sizes if "attn" in name]
            state |= {f"{prefix}{name}.bias": draw(sizes[name][0], scale=0.3) for name in names}
    return state


def write(folder, config, state):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


class Backbone:
    """The layers as their authors write them, in float64: one dense mask, the whole context anew in every cycle.

    embedding: of the target, [V, hidden].  causal: whether a slot of a layer sees no later one.  windows: of layers,
    0: none.  from_anchor: whether a window counts the positions before the block, as speculators has it.
    """

    def __init__(self, config, state, embedding, *, causal=(False, False), windows=(0, 0), from_anchor=False):
        self.config, self.state = config, {name: tensor.double() for name, tensor in state.items()}
        self.embedding, self.scale = embedding.double(), 1.0
        self.causal, self.windows, self.from_anchor = causal, windows, from_anchor

    def outputs(self, features, anchor, size):
        """Outputs of all slots [size, hidden], behind a context of features [T, layers, hidden]."""
        context = self.norm(self.linear(features.double().flatten(1), "fc"), "hidden_norm")
        x = self.embedding[torch.tensor([anchor, *[MASK] * (size - 1)])] * self.scale
        for number in range(self.config["num_hidden_layers"]):
            name = f"layers.{number}"
            h = self.norm(x, f"{name}.input_layernorm")
            x = x + self.around(h, f"{name}.attention_conv", lambda y: self.attention(y, context, number))  # noqa: B023
            h = self.norm(x, f"{name}.post_attention_layernorm")
            x = x + self.around(h, f"{name}.mlp_conv", lambda y: self.mlp(y, f"{name}.mlp"))  # noqa: B023
        return self.norm(x, "norm")

    def around(self, x, name, sublayer):
        """A sublayer between the two convolutions of DFlash 2, where it has them."""
        if f"{name}.base_kernel" not in self.state:
            return sublayer(x)
        base = self.state[f"{name}.base_kernel"]
        taps, hidden = base.shape[1:]
        change = self.linear(x, f"{name}.kernel_projection").view(len(x), 2, taps, -1)
        group = hidden // change.shape[-1]

        def mixed(rows, side):
            out = torch.zeros_like(rows)
            for i in range(len(rows)):
                for tap in range(min(taps, i + 1)):
                    for channel in range(hidden):
                        factor = base[side, tap, channel] + change[i, side, tap, channel // group]
                        out[i, channel] += factor * rows[i - tap, channel]
            return out

        return mixed(sublayer(mixed(x, 0)), 1)

    def attention(self, h, context, number):
        name, seen = f"layers.{number}.self_attn", len(context)
        whole = torch.cat([context, h])
        q = self.linear(h, f"{name}.q_proj").unflatten(1, (HEADS, DIM))
        k, v = (self.linear(whole, f"{name}.{part}_proj").unflatten(1, (KV_HEADS, DIM)) for part in "kv")
        positions = torch.arange(len(whole))
        q = self.rotated(self.norm(q, f"{name}.q_norm"), positions[seen:])
        k = self.rotated(self.norm(k, f"{name}.k_norm"), positions)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(DIM)
        own, window = positions[seen:, None], self.windows[number]
        hidden = (positions > own) & self.causal[number]
        if window:
            hidden |= positions < seen - window if self.from_anchor else own - positions >= window
        out = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return self.linear(out.flatten(1), f"{name}.o_proj")

    def mlp(self, x, name):
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def linear(self, x, name):
        return F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def norm(self, x, name):
        eps = self.config["rms_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.state[f"{name}.weight"]

    def rotated(self, x, positions):
        frequencies = self.config["rope_theta"] ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        angles = (positions.double()[:, None] * frequencies)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class PlainReading:
    """Greedy drafts of a head that reads slots alone. head: [V, hidden].  first: the first slot that predicts."""

    def __init__(self, backbone, head, first=1, size=BLOCK):
        self.backbone, self.head, self.first, self.size = backbone, head.double(), first, size

    def rows(self, features, anchor):
        return self.backbone.outputs(features, anchor, self.size)[self.first :]

    def chain(self, features, anchor):
        """Drafted tokens, and the log-probabilities of every level [levels, V]."""
        logits = self.rows(features, anchor) @ self.head.T
        return logits.argmax(-1).tolist(), logits.log_softmax(-1)
