"""The parts of a one-pass block drafter, read from a checkpoint whatever spelling of names it has."""

from __future__ import annotations

import re

import torch

from specengine.drafters.block.backbone import BlockLayer
from specengine.drafters.block.config_keys import ConfigKeys
from specengine.drafters.block.convolution import Convolution
from specengine.drafters.block.settings import read_settings
from specengine.drafters.block.vocabulary import Vocabulary
from specengine.models.checkpoint_base import ROTARY, layer_tensors
from specengine.models.config import ModelConfig
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.weight import FLOAT_FORMATS, Projection, Weight

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
    (r"^prefix_gru\.weight_(ih|hh)_l0$", r"prefix_gru.\1.weight"),
)
_IGNORED = re.compile(rf"{ROTARY}$|^t2d$|^verifier_")  # drafting does not read these
_COMPARED = 4096  # rows of two matrices that are compared at once


class BlockParts:
    """Checks and reads the parts of one checkpoint. expected: the tensors asked for so far."""

    def __init__(self, checkpoint: DraftCheckpoint, target: Transformer, dtype: str) -> None:
        self.checkpoint = checkpoint.renamed(_name_here)
        self.target = target
        self.settings = read_settings(self.checkpoint, target.config)
        self.keys = ConfigKeys(self.checkpoint)
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

    def matrix(self, name: str, rows: int, columns: int) -> Projection:
        """Reads a matrix [rows, columns], with its bias where it has one."""
        self.expect(f"{name}.weight", rows, columns)
        if f"{name}.bias" in self.checkpoint.tensors:
            self.expect(f"{name}.bias", rows)
        return self.loader.linear(name)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """Reads float32 of a shape."""
        self.expect(name, *shape)
        return self.checkpoint.read(name).float().to(self.target.device)

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
            attention_conv=self._convolution(f"{name}.attention_conv"),
            mlp_conv=self._convolution(f"{name}.mlp_conv"),
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
        return Vocabulary(head, target.ops.layer, ids, settings.output_multiplier, settings.softcap)

    def _convolution(self, name: str) -> Convolution | None:
        """Reads a convolution of DFlash 2; None where there are none."""
        if not any(own.endswith("_conv.base_kernel") for own in self.checkpoint.tensors):
            return None
        hidden = self.config.hidden_size
        taps, group = (
            self.keys.get(key, int, default) for key, default in (("conv_kernel_size", 2), ("conv_group_size", 16))
        )
        if taps < 1:
            raise self.keys.error("conv_kernel_size", f"must be positive, got {taps}")
        if group < 1 or hidden % group:
            raise self.keys.error("conv_group_size", f"must divide the hidden size {hidden}, got {group}")
        base = self.floats(f"{name}.base_kernel", 2, taps, hidden)
        kernel = self.matrix(f"{name}.kernel_projection", 2 * taps * hidden // group, hidden)
        return Convolution(base, kernel, group, self.target.ops.linear)

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
