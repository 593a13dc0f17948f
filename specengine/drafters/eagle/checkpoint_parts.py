"""What the layouts of EAGLE checkpoints share: names, sizes, layers, embedding, head."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from specengine.drafters.eagle.network import EagleParts
from specengine.models.checkpoint_base import ROTARY
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.weight import Projection

# Name in published files -> name here. The last two are the speculators library's for EAGLE-1.
_RENAMED = (
    (r"^model\.", ""),
    (r"^midlayer\.(\d+)\.", r"layers.\1."),
    (r"^midlayer\.", "layers.0."),
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
)
_IGNORED = re.compile(rf"{ROTARY}$|^t2d$|^verifier_|^target_model\.")  # drafting does not read these


class CheckpointParts:
    """Reads and checks the parts of one checkpoint. Raises ValueError for a size that is not the target's."""

    def __init__(self, checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> None:
        self.checkpoint = checkpoint.renamed(_name_here)
        self.target = target
        self.config = self.checkpoint.layer_config(_count_layers(self.checkpoint))
        self.hidden = self.config.hidden_size
        self.loader = WeightLoader(self.checkpoint, target.draft_dtype(dtype), target.device, target.ops)
        self._known: set[str] = set()
        ours, theirs = self.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise checkpoint.error(f"vocab_size is {ours}, the target's is {theirs}")
        wanted = self.checkpoint.fields.get("target_hidden_size", int, target.config.hidden_size)
        if wanted != target.config.hidden_size:
            raise checkpoint.error(f"target_hidden_size is {wanted}, the target's is {target.config.hidden_size}")

    def ignore(self, *names: str) -> None:
        """Accepts tensors that drafting does not read."""
        self._known |= set(names)

    def expect_layers(self, first_columns: int, first_norms: tuple[str, ...]) -> None:
        """Checks the tensors of all layers. first_columns: of the first layer's q, k and v."""
        config = self.config
        for number in range(config.num_layers):
            norms = (*(first_norms if number == 0 else ("input_layernorm",)), "post_attention_layernorm")
            for name, shape in layer_shapes(config, self.hidden if number else first_columns, norms).items():
                full = f"layers.{number}.{name}"
                if not name.endswith(".bias") or full in self.checkpoint.tensors:
                    self.checkpoint.expect(full, *shape)
                self._known.add(full)

    def expect_nothing_else(self, *names: str) -> None:
        """Raises ValueError for any other tensor: an unread tensor means arithmetic that is not implemented here."""
        known = {*self._known, *names, "fc.weight", "embed_tokens.weight"}
        for name in self.checkpoint.tensors:
            if name not in known and not _IGNORED.search(name):
                raise self.checkpoint.error(f"tensor '{name}' is unexpected, this layout is not known")

    def vocabulary(self, target: Transformer) -> tuple[torch.Tensor | None, Projection]:
        """Returns the target's token of each of the drafter's, None where they are the same, and the head."""
        tensors = self.checkpoint.tensors
        vocab = target.config.vocab_size
        if "t2d" in tensors:
            self.checkpoint.expect("t2d", vocab)
        if "lm_head.weight" not in tensors:
            if "d2t" in tensors or self.hidden != target.config.hidden_size:
                raise self.checkpoint.error("tensor 'lm_head.weight' is missing")
            return None, target.head
        tokens = self.checkpoint.vocabulary(target.config)
        rows = self.checkpoint.rows("lm_head.weight")
        if tokens is None and rows != vocab:
            raise self.checkpoint.error(
                f"tensor 'd2t' is missing, though the head has {rows} tokens and the target {vocab}"
            )
        self.checkpoint.expect("lm_head.weight", vocab if tokens is None else len(tokens), self.hidden)
        head = self.loader.linear("lm_head")
        return None if tokens is None else tokens.int().to(target.device), head

    def network_parts(self, head: Projection) -> EagleParts:
        """Returns what every network is made of."""
        if "embed_tokens.weight" in self.checkpoint.tensors:
            self.checkpoint.expect("embed_tokens.weight", self.target.config.vocab_size, self.hidden)
            embedding = self.loader.linear("embed_tokens").weights[0]
        elif self.hidden == self.target.config.hidden_size:
            embedding = self.target.embedding
        else:
            raise self.checkpoint.error(
                f"tensor 'embed_tokens.weight' is missing, and hidden_size {self.hidden} is not the target's "
                f"{self.target.config.hidden_size}, so its embedding does not fit"
            )
        reach = self.checkpoint.attention_reach
        layers = [self.loader.layer_at(f"layers.{number}", reach) for number in range(self.config.num_layers)]
        target = self.target
        return EagleParts(self.config, layers, embedding, head, target.config.hidden_size, target.ops, target.device)


def layer_shapes(config: ModelConfig, columns: int, norms: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a layer's tensors with every bias. columns: of q, k and v."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, columns),
        "self_attn.k_proj": (keys, columns),
        "self_attn.v_proj": (keys, columns),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _count_layers(checkpoint: DraftCheckpoint) -> int:
    """Counts the layers by their tensors: num_hidden_layers may be the target's."""
    found = (re.match(r"layers\.(\d+)\.", name) for name in checkpoint.tensors)
    return 1 + max((int(layer[1]) for layer in found if layer), default=0)


def _name_here(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
