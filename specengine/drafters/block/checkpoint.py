"""A one-pass block drafter from its checkpoint, whatever spelling of names the file has."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from specengine.drafters.block.backbone import Backbone, BackboneParts, BlockLayer
from specengine.drafters.block.head import BlockHead, PlainHead
from specengine.drafters.block.settings import BlockSettings, read_settings
from specengine.drafters.block.vocabulary import Vocabulary
from specengine.models.checkpoint_base import layer_tensors
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.weight import FLOAT_FORMATS, Weight

# Name in published files -> name here.
_RENAMED = (
    (r"^(draft_model|model)\.", ""),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^midlayer\.(\d+)\.", r"layers.\1."),
    (r"^midlayer\.", "layers.0."),
    (r"^logit_head\.", ""),
    (r"^(markov_w[12]|gate_proj|joint_proj)\.", r"markov_head.\1."),
    (r"_codebook$", "_codebook.weight"),
)
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|^t2d$|^verifier_")  # drafting does not read these
_COMPARED = 4096  # rows of two matrices that are compared at once


@dataclass(frozen=True)
class LoadedBlock:
    """A drafter's backbone and head."""

    settings: BlockSettings
    backbone: Backbone
    head: BlockHead


def load_block(checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> LoadedBlock:
    """Loads a drafter. Raises ValueError naming a part or key that does not fit the target or is not implemented."""
    parts = BlockParts(checkpoint, target, dtype)
    embedding, vocabulary = parts.embedding(), parts.vocabulary()
    layers = [parts.layer(number) for number in range(parts.config.num_layers)]
    head = parts.head(vocabulary)
    parts.expect_nothing_else()
    loader = parts.loader
    backbone = Backbone(
        BackboneParts(
            config=parts.config,
            settings=parts.settings,
            layers=layers,
            embedding=embedding,
            fc=loader.linear("fc"),
            context_norm=loader.vector("hidden_norm.weight"),
            final_norm=loader.vector("norm.weight"),
            target_size=target.config.hidden_size,
            ops=target.ops,
            device=target.device,
        )
    )
    return LoadedBlock(parts.settings, backbone, head)


class BlockParts:
    """Checks and reads the parts of one checkpoint. expected: the tensors asked for so far."""

    def __init__(self, checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> None:
        self.checkpoint = checkpoint.renamed(_name_here)
        self.target = target
        self.settings = read_settings(self.checkpoint, target.config)
        self.config: ModelConfig = self.checkpoint.layer_config()
        self.loader = WeightLoader(self.checkpoint, target.draft_dtype(dtype), target.device, target.ops)
        self._known: set[str] = set()
        hidden, features = self.config.hidden_size, len(self.settings.features)
        self.expect("fc.weight", hidden, features * target.config.hidden_size)
        self.expect("hidden_norm.weight", hidden)
        self.expect("norm.weight", hidden)

    def expect(self, name: str, *shape: int) -> None:
        """Raises ValueError where a tensor is missing or has another shape."""
        self.checkpoint.expect(name, *shape)
        self._known.add(name)

    def expect_nothing_else(self) -> None:
        """Raises ValueError for any other tensor: an unread one means arithmetic that is not implemented here."""
        for name in self.checkpoint.tensors:
            if name not in self._known and not _IGNORED.search(name):
                raise self.checkpoint.error(f"tensor '{name}' is unexpected, this layout is not known")

    def layer(self, number: int) -> BlockLayer:
        """Reads one layer."""
        name = f"layers.{number}"
        for tensor, shape in layer_tensors(self.config, f"{name}.").items():
            self.expect(tensor, *shape)
        loader, attention = self.loader, f"{name}.self_attn"
        return BlockLayer(
            attention_norm=loader.vector(f"{name}.input_layernorm.weight"),
            q=loader.linear(f"{attention}.q_proj"),
            kv=loader.linear(f"{attention}.k_proj", f"{attention}.v_proj"),
            q_norm=loader.vector_if_any(f"{attention}.q_norm.weight"),
            k_norm=loader.vector_if_any(f"{attention}.k_norm.weight"),
            attention_out=loader.linear(f"{attention}.o_proj"),
            mlp_norm=loader.vector(f"{name}.post_attention_layernorm.weight"),
            gate_up=loader.linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
            down=loader.linear(f"{name}.mlp.down_proj"),
        )

    def embedding(self) -> Weight:
        """Returns the drafter's own embedding, or the target's where it has none or a copy."""
        name, target = "embed_tokens.weight", self.target
        if name not in self.checkpoint.tensors:
            self._check_shared(name)
            return target.embedding
        self.expect(name, target.config.vocab_size, self.config.hidden_size)
        if self._copies(name, target.embedding):
            return target.embedding
        return self.loader.linear("embed_tokens").weights[0]

    def vocabulary(self) -> Vocabulary:
        """Returns the output head: the drafter's own, or the target's where it has none or a copy."""
        name, target, settings = "lm_head.weight", self.target, self.settings
        tokens = self.checkpoint.vocabulary(target.config)
        ids = None if tokens is None else tokens.int().to(target.device)
        if ids is not None:
            self._known.add("d2t")
        if name not in self.checkpoint.tensors:
            self._check_shared(name)
            head = target.head_rows(ids)
        else:
            self.expect(name, target.config.vocab_size if ids is None else len(ids), self.config.hidden_size)
            whole = ids is None and len(target.head.weights) == 1 and target.head.bias is None
            copy = whole and self._copies(name, target.head.weights[0])
            head = target.head if copy else self.loader.linear("lm_head")
        return Vocabulary(head, target.ops.linear, ids, settings.output_multiplier, settings.softcap)

    def head(self, vocabulary: Vocabulary) -> BlockHead:
        """Reads what follows the layers."""
        if self.settings.family == "dflash":
            return PlainHead(vocabulary)
        raise self.checkpoint.error(f"is a drafter of family {self.settings.family}, which is not supported")

    def _check_shared(self, name: str) -> None:
        ours, theirs = self.config.hidden_size, self.target.config.hidden_size
        if ours != theirs:
            raise self.checkpoint.error(f"without '{name}' it shares the target's, of hidden size {theirs}, not {ours}")

    def _copies(self, name: str, weight: Weight) -> bool:
        """Returns whether a matrix is the target's, so that one of both is enough."""
        rows = self.checkpoint.rows(name)
        columns = self.checkpoint.tensors[name].shape[1]
        if weight.format not in FLOAT_FORMATS or (weight.rows, self.target.config.hidden_size) != (rows, columns):
            return False
        kind, device = FLOAT_FORMATS[weight.format], self.target.device
        for start in range(0, rows, _COMPARED):
            ids = torch.arange(start, min(start + _COMPARED, rows), dtype=torch.int32, device=device)
            own = self.checkpoint.read_rows(name, start, start + len(ids)).to(device)
            theirs = torch.empty(own.shape, device=device)
            self.target.ops.layer.gather_rows(weight, ids, theirs)
            if not torch.equal(own.to(kind), theirs.to(kind)):
                return False
        return True


def _name_here(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
