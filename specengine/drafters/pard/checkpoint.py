"""What a PARD checkpoint has beside its model: the mask token, and of PARD-2 how it reads the target's features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specengine.drafters.pard.features import TargetFeatures
from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint_base import Checkpoint
from specengine.models.checkpoint_hf import SafetensorsCheckpoint, TorchBinCheckpoint
from specengine.models.draft_checkpoint import DraftCheckpoint
from specengine.models.transformer import Transformer
from specengine.models.weights import WeightLoader
from specengine.utils.json_fields import Fields
from specengine.utils.json_file import read_json_object

PROJECTION = "target_proj"


class WarpModel(TorchBinCheckpoint):
    """warp_model.bin, the file of PARD-2's own training with what it adds to the model."""

    filename = "warp_model.bin"


class WarpSafetensors(SafetensorsCheckpoint):
    """warp_model.safetensors, the same tensors as a model hub converts them."""

    filename = "warp_model.safetensors"


@dataclass(frozen=True)
class PardCheckpoint:
    """The folder of a PARD model.

    mask_token: stands for every token that is not known yet.  fields: of config.json.
    """

    folder: Path
    mask_token: int
    fields: Fields

    @staticmethod
    def open(path: str | None) -> PardCheckpoint:
        """Opens a folder or hub name. Raises ValueError for a model without `pard_token`."""
        if path is None:
            raise ValueError("drafter: pard:PATH takes a model that was trained with PARD")
        found = resolve_model(path)
        config = Path(found) / "config.json"
        if not config.is_file():
            raise ValueError(f"drafter: pard: {path}: expected a folder with config.json, which names pard_token")
        fields = Fields(read_json_object(config), str(config))
        if fields.data.get("pard_token") is None:
            raise fields.error(
                "pard_token", "is missing; expected a model trained with PARD. Other models draft as draft-model:PATH"
            )
        token, vocab = fields.get("pard_token", int), fields.get("vocab_size", int)
        if not 0 <= token < vocab:
            raise fields.error("pard_token", f"must be a token from 0 to {vocab - 1}, got {token}")
        return PardCheckpoint(Path(found), token, fields)

    @property
    def reads_features(self) -> bool:
        """Whether it was trained with the target's features (PARD-2). Raises ValueError for an unknown kind."""
        kind = self.fields.get("spd_type", str, "pard")
        if kind not in ("pard", "pard2"):
            raise self.fields.error("spd_type", f"must be pard or pard2, got {kind!r}")
        return self.fields.get("pard2", bool, False) or kind == "pard2"

    def features(self, hidden: int, target: Transformer, dtype: str) -> TargetFeatures:
        """Loads the projection of the target's features to `hidden` columns.

        Raises ValueError where it is missing or does not fit the target.
        """
        fields = self.fields
        layers = fields.get("pard2_target_layers", list)
        if not layers or any(type(layer) is not int for layer in layers):
            raise fields.error("pard2_target_layers", f"must be a list of numbers of hidden states, got {layers!r}")
        count, width = target.config.num_layers, target.config.hidden_size
        if any(not -count - 1 <= layer <= count for layer in layers):
            raise fields.error(
                "pard2_target_layers", f"must be numbers from {-count - 1} to {count}, as the target has, got {layers}"
            )
        columns = len(layers) * width
        if (wanted := fields.get("pard2_target_dim", int, columns)) != columns:
            raise fields.error(
                "pard2_target_dim", f"is {wanted}, but {len(layers)} layers of the target have {columns} columns"
            )
        files = DraftCheckpoint(self._files(), {})
        files.expect(f"{PROJECTION}.weight", hidden, columns)
        biased = f"{PROJECTION}.bias" in files.tensors
        if biased != fields.get("pard2_proj_bias", bool, fields.get("proj_bias", bool, biased)):
            raise fields.error(
                "pard2_proj_bias", f"contradicts the tensors: '{PROJECTION}.bias' is {'there' if biased else 'missing'}"
            )
        old = fields.get("pard_scale", float, fields.get("feat_scale", float, 0.02))
        return TargetFeatures(
            [layer % (count + 1) for layer in layers],
            WeightLoader(files, target.draft_dtype(dtype), target.device, target.ops).linear(PROJECTION),
            fields.get("pard2_scale", float, old),
            target,
        )

    def _files(self) -> Checkpoint:
        """Returns the file that has the projection."""
        for kind in (WarpModel, WarpSafetensors, SafetensorsCheckpoint):
            if any((self.folder / f"{kind.filename}{suffix}").is_file() for suffix in (".index.json", "")):
                files = kind(self.folder)
                if f"{PROJECTION}.weight" in files.tensors:
                    return files
        raise ValueError(
            f"drafter: pard: {self.folder}: tensor '{PROJECTION}.weight' is missing; expected it in warp_model.bin. "
            "With features=false the model drafts without the target's features"
        )
