"""Block drafters whose heads read the drafted path: random weights in published layouts, and straight readings."""

import torch
import torch.nn.functional as F

from tests.drafters.block_files import BLOCK, DFLASH, GROUP, GRU, HIDDEN, MASK, RANK, SIZES, VOCAB, WIDE, draw, norm
from tests.drafters.block_files import backbone_state as backbone

DSPARK = SIZES | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [-1, 0],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DOMINO = DFLASH | {
    "dflash_config": GROUP
    | {
        "projector_type": "domino",
        "emb_dim": WIDE,
        "gru_hidden_dim": GRU,
        "pure_draft_prefix_len": 1,
        "shift_label": False,
    }
}
DFLASH2 = DFLASH | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": GROUP
    | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 5}
    | {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 3.0},
}
SPECULATORS = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkDraftModel"],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "aux_hidden_state_layer_ids": [0, 1],
    "markov_rank": RANK,
    "draft_vocab_size": 100,
    "transformer_layer_config": SIZES,
}


def dspark_state(config=DSPARK, kind="vanilla", rows=VOCAB):
    """rows: of the head and of W2."""
    state, sized = backbone(SIZES), config["markov_rank"]
    if sized:
        state |= {
            "markov_head.markov_w1.weight": draw(VOCAB, sized),
            "markov_head.markov_w2.weight": draw(rows, sized) * 2,
        }
    inner = {"gated": ("gate_proj", RANK, HIDDEN + RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK + HIDDEN)}
    if kind in inner:
        name, *shape = inner[kind]
        state |= {f"markov_head.{name}.weight": draw(*shape) * 2, f"markov_head.{name}.bias": draw(shape[0])}
    if config.get("enable_confidence_head"):
        wide = HIDDEN + RANK if config["confidence_head_with_markov"] else HIDDEN
        state |= {"confidence_head.proj.weight": draw(1, wide) * 2, "confidence_head.proj.bias": draw(1)}
    return state


def domino_state():
    sizes = {
        "prefix_gru.weight_ih_l0": (3 * GRU, HIDDEN),
        "prefix_gru.weight_hh_l0": (3 * GRU, GRU),
        "embed_proj.0.weight": (WIDE, HIDDEN + GRU),
        "embed_proj.2.weight": (VOCAB, WIDE),
    }
    return backbone(SIZES) | {name: draw(*shape) * 2 for name, shape in sizes.items()}


def dflash2_state(config=DFLASH2):
    group = config["dflash_config"]
    taps, channels = group["conv_kernel_size"], group["conv_group_size"]
    state = backbone(SIZES)
    for number in range(2):
        for name in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{number}.{name}"
            state[f"{prefix}.base_kernel"] = torch.stack(
                [norm(2, HIDDEN), *(draw(2, HIDDEN) for _ in range(taps - 1))], 1
            )
            state[f"{prefix}.kernel_projection.weight"] = draw(2 * taps * HIDDEN // channels, HIDDEN) * 0.5
    for name in ("predecessor_codebook", "successor_codebook"):
        state[f"candidate_selector.{name}"] = draw(VOCAB, RANK, scale=1)
    return state | {"candidate_selector.hidden_projection.weight": draw(RANK, HIDDEN)}


class PathReading:
    """Distributions of a head behind a path. head: [Vd, hidden].  tokens: the target's of its rows, or None."""

    first = 1  # slot that predicts

    def __init__(self, backbone, head, tokens=None):
        self.backbone, self.head, self.state = backbone, head.double(), backbone.state
        self.tokens = list(range(len(head))) if tokens is None else tokens

    def outputs(self, features, anchor):
        return self.backbone.outputs(features, anchor, BLOCK)[self.first :]

    def scores(self, outputs, path):
        """Logits behind a path, anchor first, and the confidence in the next token, or None."""
        raise NotImplementedError

    def log_probs(self, outputs, path):
        return self.scores(outputs, path)[0].log_softmax(-1)

    def chain(self, features, anchor):
        outputs, path = self.outputs(features, anchor), [anchor]
        while len(path) <= len(outputs):
            path.append(self.tokens[self.scores(outputs, path)[0].argmax()])
        return path[1:], None


class MarkovReading(PathReading):
    """DSpark. kind: of the Markov head, None: there is none."""

    first = 0

    def __init__(self, *args, kind="vanilla", **options):
        super().__init__(*args, **options)
        self.kind = kind

    def scores(self, outputs, path):
        level = len(path) - 1
        read, confidence = outputs[level], None
        logits = self.head @ read
        if self.kind:
            row = self.state["markov_head.markov_w1.weight"][path[-1]]
            logits = logits + self.state["markov_head.markov_w2.weight"] @ self.change(outputs, path)
            read = torch.cat([read, row])
        if "confidence_head.proj.weight" in self.state:
            weight = self.state["confidence_head.proj.weight"][0]
            confidence = (weight @ read[: len(weight)] + self.state["confidence_head.proj.bias"]).sigmoid().item()
        return logits, confidence

    def change(self, outputs, path):
        table, inner = self.state["markov_head.markov_w1.weight"], lambda x, name: self.inner(x, name)
        if self.kind == "gated":
            slot, row = outputs[len(path) - 1], table[path[-1]]
            return inner(torch.cat([slot, row]), "gate_proj").sigmoid() * row
        if self.kind == "rnn":
            state = torch.zeros(RANK).double()
            for token, slot in zip(path, outputs, strict=False):
                gate, new, out = inner(torch.cat([state, table[token], slot]), "joint_proj").split(RANK)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
            return out.tanh()
        return table[path[-1]]

    def inner(self, x, name):
        return F.linear(x, self.state[f"markov_head.{name}.weight"], self.state[f"markov_head.{name}.bias"])


class GruReading(PathReading):
    """Domino, by torch's own GRU. prefix: levels without a correction."""

    prefix = 1

    def scores(self, outputs, path):
        level = len(path) - 1
        logits = self.head @ outputs[level]
        if level < self.prefix:
            return logits, None
        gru = torch.nn.GRU(HIDDEN, GRU, bias=False).double()
        gru.load_state_dict({name: self.state[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
        with torch.no_grad():
            state = gru(self.backbone.embedding[torch.tensor(path)])[1][0]
        wide = F.silu(self.state["embed_proj.0.weight"] @ torch.cat([outputs[level], state]))
        return logits + self.state["embed_proj.2.weight"] @ wide, None


class SelectorReading(PathReading):
    """DFlash 2: of the likeliest tokens of a slot, those that follow the token above."""

    def __init__(self, *args, config=DFLASH2):
        super().__init__(*args)
        self.group = config["dflash_config"]
        self.backbone.scale = self.group["input_embedding_scale"]

    def scores(self, outputs, path):
        slot, state = outputs[len(path) - 1], self.state
        raw = self.head @ slot
        kept = raw.topk(self.group["selector_top_k"]).indices.tolist()
        cap = self.group["final_logit_softcapping"]
        capped = cap * torch.tanh(raw * self.group["output_multiplier"] / cap)
        row = state["candidate_selector.predecessor_codebook"][path[-1]]
        row = row * (state["candidate_selector.hidden_projection.weight"] @ slot)
        logits = torch.full_like(raw, -torch.inf)
        for token in kept:
            logits[token] = capped[token] + row @ state["candidate_selector.successor_codebook"][token]
        return logits, None
