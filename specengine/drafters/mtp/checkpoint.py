"""The MTP network from the folder or the GGUF file of its model, where it lies beside the layers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from specengine.drafters.eagle.checkpoint import LoadedEagle
from specengine.drafters.eagle.network import EagleParts
from specengine.drafters.mtp.gguf import gguf_mtp
from specengine.drafters.mtp.network import MtpNetwork, MtpNorms
from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint_base import Checkpoint, layer_tensors
from specengine.models.config import ModelConfig
from specengine.models.draft_files import open_draft_files
from specengine.models.experts.tensors import named_experts
from specengine.models.gated_delta.hf_config import HYBRIDS
from specengine.models.quantised.checkpoint import QuantisedCheckpoint
from specengine.models.quantised.settings import read_settings
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.ops.coded.rows import CodedRows
from specengine.utils.model_files import is_gguf

_FIRST = "mtp."  # how the names of its tensors begin
_LAYER = "mtp.layers.0"
_ROUTER = f"{_LAYER}.mlp.gate.weight"
_NORM = re.compile(r".*norm(_embedding|_hidden)?\.weight")


class MtpTensors(Checkpoint):
    """The tensors `mtp.*` of some files. Norms multiply by 1 + w, and 1 + w is read.

    config: of its one layer.  folded: whether norms are stored as 1 + w, not as w.
    """

    def __init__(self, stored: Checkpoint, config: ModelConfig, folded: bool) -> None:
        self.source, self.config = stored.source, config
        self._stored, self._folded = stored, folded
        self.tensors = {
            name: replace(info, dtype="float32") if _NORM.fullmatch(name) else info
            for name, info in stored.tensors.items()
            if name.startswith(_FIRST)
        }

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See Checkpoint."""
        return self._stored.read_blocks(name, start, stop)

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        """See Checkpoint."""
        return self._stored.read_coded(name, start, stop)

    def column_order(self, name: str) -> torch.Tensor | None:
        """See Checkpoint."""
        return self._stored.column_order(name)

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        rows = self._stored.read_rows(name, start, stop)
        out.copy_(1 + rows.float() if _NORM.fullmatch(name) and not self._folded else rows)


def has_mtp(target: Transformer) -> bool:
    """Returns whether the folder or the GGUF file that a target was read from has an MTP network."""
    path = Path(target.weights.source)
    if is_gguf(path) and target.config.architecture not in HYBRIDS:
        return False  # the header of a file takes half a second
    return _stored(path) is not None


def load_mtp(path: str | None, target: Transformer, dtype: str) -> LoadedEagle:
    """Loads the network from a folder, a GGUF file or a hub name; without a path, from the target's own files.

    Raises ValueError where there is none, and for a tensor that is missing, unexpected or does not fit the target.
    """
    place = Path(target.weights.source) if path is None else Path(resolve_model(path))
    stored = _stored(place)
    if stored is None:
        raise ValueError(
            f"drafter: mtp: {place} has no tensors mtp.* or blk.N.nextn.*; expected the folder or GGUF file of a model "
            "that has them, such as Qwen3.5, as the target or as mtp:PATH"
        )
    moe = target.config.moe if _ROUTER in stored.tensors else None
    config = replace(  # of the target's own kind, with attention
        target.config,
        num_layers=1,
        moe=None if moe is None else replace(moe, dense_layers=frozenset()),
        gated_delta=None,
        sliding_window=None,
        sliding_layers=(),
    )
    checkpoint = named_experts(MtpTensors(stored, config, folded=is_gguf(place)))
    _check(checkpoint)
    loader = WeightLoader(checkpoint, target.draft_dtype(dtype), target.device, target.ops)
    layers = [loader.layer_at(_LAYER, moe=config.moe)]
    shared = target.embedding, target.head, config.hidden_size, target.ops, target.device
    norms = MtpNorms(
        embedding=loader.vector("mtp.pre_fc_norm_embedding.weight"),
        hidden_state=loader.vector("mtp.pre_fc_norm_hidden.weight"),
        out=loader.vector("mtp.norm.weight"),
    )
    return LoadedEagle(MtpNetwork(norms, loader.linear("mtp.fc"), EagleParts(config, layers, *shared)), (), None)


def _stored(place: Path) -> Checkpoint | None:
    """Opens a folder's files, or a GGUF file; None where it is neither, or its files have no MTP network."""
    if is_gguf(place):
        return gguf_mtp(place)
    if not place.is_dir():
        return None
    settings = read_settings(place)
    files = open_draft_files(place) if settings is None else QuantisedCheckpoint(place, settings)
    return files if any(name.startswith(_FIRST) for name in files.tensors) else None


def _check(checkpoint: Checkpoint) -> None:
    """Raises ValueError unless a checkpoint has the tensors of one layer, in the sizes of its configuration."""
    config = checkpoint.config
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    expected: dict[str, tuple[int, ...]] = {f"{name}.weight": (config.hidden_size,) for name in norms}
    expected["mtp.fc.weight"] = (config.hidden_size, 2 * config.hidden_size)
    expected |= layer_tensors(config, f"{_LAYER}.", config.moe)
    for name, shape in expected.items():
        if name not in checkpoint.tensors:
            raise ValueError(f"drafter: mtp: {checkpoint.source}: tensor '{name}' is missing")
        if checkpoint.tensors[name].shape != shape:
            found = checkpoint.tensors[name].shape
            raise ValueError(f"drafter: mtp: {checkpoint.source}: tensor '{name}' has shape {found}, expected {shape}")
    for name in checkpoint.tensors:
        if name not in expected:
            raise ValueError(
                f"drafter: mtp: {checkpoint.source}: tensor '{name}' is unexpected; expected one layer, which shares "
                "the target's embedding and head"
            )
