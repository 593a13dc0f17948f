"""EAGLE checkpoints of random weights in every known layout, and a straight-line reading of what they compute."""

import json
import math

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, DRAFT_VOCAB = 64, 4, 2, 96, 320, 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def draw(*shape, scale=None):
    return torch.randn(*shape) * (scale or 1 / math.sqrt(shape[-1]))


def layer_tensors(prefix, config, columns, norms, bias=False):
    hidden, dim = (
        config["hidden_size"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    sizes = {
        "self_attn.q_proj": (queries, columns),
        "self_attn.k_proj": (keys, columns),
        "self_attn.v_proj": (keys, columns),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (config["intermediate_size"], hidden),
        "mlp.up_proj": (config["intermediate_size"], hidden),
        "mlp.down_proj": (hidden, config["intermediate_size"]),
    }
    state = {f"{prefix}.{name}.weight": draw(*shape) for name, shape in sizes.items()}
    if bias:
        state |= {f"{prefix}.{name}.bias": draw(shape[0], scale=0.3) for name, shape in sizes.items() if "attn" in name}
    return state | {f"{prefix}.{name}.weight": 1 + draw(hidden, scale=0.2) for name in norms}


def offsets(config):
    kept = torch.randperm(config["vocab_size"])[: config["draft_vocab_size"]].sort().values
    table = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, kept, True)
    return kept - torch.arange(len(kept)), table


def eagle3_state(
    config, prefix="midlayer", hidden_state_layers=3, *, d2t=True, bias=False, embedding=False, target=HIDDEN
):
    hidden = config["hidden_size"]
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    state = {"fc.weight": draw(hidden, hidden_state_layers * target), "norm.weight": 1 + draw(hidden, scale=0.2)}
    state |= layer_tensors(prefix, config, 2 * hidden, norms, bias)
    for number in range(1, config["num_hidden_layers"]):
        state |= layer_tensors(f"layers.{number}", config, hidden, norms[1:], bias)
    state["lm_head.weight"] = draw(config["draft_vocab_size" if d2t else "vocab_size"], hidden, scale=0.3)
    if d2t:
        state["d2t"], state["t2d"] = offsets(config)
    if embedding:
        state["embed_tokens.weight"] = draw(config["vocab_size"], hidden, scale=1.0)
    return state


def eagle1_state(config, *, bias=True):
    hidden = config["hidden_size"]
    state = {"fc.weight": draw(hidden, 2 * hidden)} | ({"fc.bias": draw(hidden, scale=0.3)} if bias else {})
    return state | layer_tensors("layers.0", config, hidden, ("post_attention_layernorm",))


def layouts():
    """name -> (drafter, config, state, fields that the reading needs): the published layouts and their variants."""
    torch.manual_seed(5)

    def with_(**fields):
        return CONFIG | fields

    def norms(state, **more):
        return state | {name: 1 + draw(size, scale=0.2) for name, size in more.items()}

    wide, two = with_(head_dim=32), with_(num_hidden_layers=2)
    other = with_(hidden_size=32, target_hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=1)
    nested = {"transformer_layer_config": CONFIG, "speculators_model_type": "eagle3", "norm_before_residual": True}
    grouped = {k: v for k, v in CONFIG.items() if k != "eagle_aux_hidden_state_layer_ids"}
    each = {f"fc_norm.{i}.weight": HIDDEN for i in range(3)}
    return {
        "official": ("eagle3", CONFIG, eagle3_state(CONFIG)),
        "speculators": ("eagle3", nested, eagle3_state(CONFIG, "layers.0")),
        "a prefix before all names": (
            "eagle3",
            CONFIG,
            {f"model.{name}": tensor for name, tensor in eagle3_state(CONFIG).items()},
        ),
        "same vocabulary": ("eagle3", CONFIG, eagle3_state(CONFIG, d2t=False)),
        "biases": ("eagle3", CONFIG, eagle3_state(CONFIG, bias=True)),
        "wide heads": ("eagle3", wide, eagle3_state(wide)),
        "two layers": ("eagle3", two, eagle3_state(two, "layers.0")),
        "other hidden size": ("eagle3", other, eagle3_state(other, embedding=True)),
        "own embedding": ("eagle3", CONFIG, eagle3_state(CONFIG, embedding=True)),
        "a norm per feature": (
            "eagle3",
            with_(fc_norm=True, norm_output=True),
            norms(eagle3_state(CONFIG), **each),
        ),
        "a norm per feature alone": ("eagle3", CONFIG, norms(eagle3_state(CONFIG), **each)),
        "a normed output": ("eagle3", with_(norm_output=True, num_aux_hidden_states=3), eagle3_state(CONFIG)),
        "a norm before fc": (
            "eagle3",
            with_(norm_before_fc=True),
            norms(eagle3_state(CONFIG), **{"input_norm.weight": 3 * HIDDEN}),
        ),
        "layers by their outputs": (
            "eagle3",
            grouped | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 0]}},
            eagle3_state(CONFIG),
        ),
        "layers as DeepSpec names them": (
            "eagle3",
            grouped | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 0, 0]},
            eagle3_state(CONFIG, "layers.0", d2t=False),
        ),
        "a single feature layer": (
            "eagle3",
            with_(eagle_aux_hidden_state_layer_ids=[1]),
            eagle3_state(CONFIG, hidden_state_layers=1),
        ),
        "no feature layer": (
            "eagle3",
            CONFIG,
            {name: tensor for name, tensor in eagle3_state(CONFIG).items() if name != "fc.weight"},
        ),
        "rope base": ("eagle3", with_(rope_theta=500.0), eagle3_state(CONFIG)),
        "short training": ("eagle3", with_(trained_length=9), eagle3_state(CONFIG)),
        "short context": ("eagle3", with_(max_position_embeddings=9), eagle3_state(CONFIG)),
        "eagle 1": ("eagle", CONFIG, eagle1_state(CONFIG)),
        "eagle 1 without bias": ("eagle", CONFIG, eagle1_state(CONFIG, bias=False)),
        "eagle 1, speculators": (
            "eagle",
            CONFIG,
            {
                name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
                for name, tensor in eagle1_state(CONFIG).items()
            },
        ),
    }


def write_drafter(folder, config, state, kind="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind.endswith("safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / kind)
    else:
        torch.save(state, folder / kind)
    return folder


class Reading:
    """A drafter as its paper has it: dense attention over all rows, everything anew for every token.

    embedding, head: of the target, float32 [V, hidden].
    """

    def __init__(self, drafter, config, state, embedding, head):
        names = {"model.": "", "midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}
        self.state = {}
        for name, tensor in state.items():
            for old, new in names.items():
                name = new + name.removeprefix(old) if name.startswith(old) else name
            self.state[name] = tensor.double() if tensor.is_floating_point() else tensor
        self.config = config | config.get("transformer_layer_config", {})
        self.three = drafter == "eagle3"
        self.embedding = self.state.get("embed_tokens.weight", embedding.double())
        self.head = self.state.get("lm_head.weight", head.double())

    def norm(self, x, name):
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.state[name]

    def linear(self, x, name):
        return F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def tokens(self):
        """The target's token of each column of the logits."""
        ids = torch.arange(len(self.head))
        return ids + self.state["d2t"] if "d2t" in self.state else ids

    def feature_layers(self):
        grouped = self.config.get("eagle_config")
        if grouped:
            return [layer + 1 for layer in grouped["eagle_aux_hidden_state_layer_ids"]]
        if "target_layer_ids" in self.config:
            return [layer + 1 for layer in self.config["target_layer_ids"]]
        return self.config["eagle_aux_hidden_state_layer_ids"]

    def fused(self, last, states):
        """Rows of true hidden states; last: [n, hidden] after the final norm, states: the input of each layer."""
        if not self.three or "fc.weight" not in self.state:
            return last.double()
        return self.joined([states[layer].double() for layer in self.feature_layers()])

    def joined(self, parts):
        """Rows of hidden states of several layers, each [n, hidden], in the order of fc's columns."""
        if "fc_norm.0.weight" in self.state:
            parts = [self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
        wide = torch.cat(parts, -1)
        if "input_norm.weight" in self.state:
            wide = self.norm(wide, "input_norm.weight")
        return self.linear(wide, "fc")

    def logits(self, fused, tokens):
        """Logits [Vd] after the last of `tokens`, which follow the true hidden states and what was made of them."""
        rows = list(fused)
        for count in range(len(fused), len(tokens) + 1):
            out = self.outputs(torch.stack(rows), torch.tensor(tokens[:count]))
            normed = self.norm(out, "norm.weight") if self.three else out
            rows.append((normed if self.config.get("norm_output") else out)[-1])
        return self.head @ normed[-1]

    def outputs(self, x, tokens):
        embedded = self.embedding[tokens]
        if self.three:
            feature = self.norm(x, "layers.0.hidden_norm.weight")
            inner = torch.cat([self.norm(embedded, "layers.0.input_layernorm.weight"), feature], -1)
            x = feature if self.config.get("norm_before_residual") else x
        else:
            inner = x = self.linear(torch.cat([embedded, x], -1), "fc")
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            inner = self.norm(x, f"{name}.input_layernorm.weight") if layer else inner
            x = x + self.attention(inner, f"{name}.self_attn")
            inner = self.norm(x, f"{name}.post_attention_layernorm.weight")
            gate, up = (self.linear(inner, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
        return x

    def attention(self, x, name):
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (self.linear(x, f"{name}.{part}_proj") for part in "qkv")
        dim, rows = q.shape[1] // heads, len(x)
        q, k, v = (part.view(rows, -1, dim).transpose(0, 1) for part in (q, k, v))
        q, k = self.rotated(q), self.rotated(k)
        k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
        distance = torch.arange(rows)[:, None] - torch.arange(rows)
        seen = (distance >= 0) & (distance < self.config.get("trained_length", self.config["max_position_embeddings"]))
        scores = (q @ k.transpose(1, 2) / math.sqrt(dim)).masked_fill(~seen, -torch.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(rows, -1), f"{name}.o_proj")

    def rotated(self, x):
        dim = x.shape[-1]
        frequencies = self.config.get("rope_theta", 10000.0) ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
