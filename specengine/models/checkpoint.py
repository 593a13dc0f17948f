"""Opens checkpoints: safetensors, pytorch_model.bin, GGUF and random weights behind one interface."""

from __future__ import annotations

from pathlib import Path

from specengine.models.checkpoint_base import Checkpoint, TensorInfo, expected_tensors, validate_tensors
from specengine.models.checkpoint_gguf import GGUFCheckpoint
from specengine.models.checkpoint_hf import SafetensorsCheckpoint, TorchBinCheckpoint
from specengine.models.checkpoint_random import RandomCheckpoint
from specengine.models.experts.tensors import named_experts
from specengine.models.gated_delta.tensors import HybridTensors, named_hybrid
from specengine.models.gguf_dialects import OLLAMA_HINT, of_ollama
from specengine.models.presets import PRESETS
from specengine.models.quantised.checkpoint import QuantisedCheckpoint
from specengine.models.quantised.settings import read_settings
from specengine.models.renamed import with_ends, with_prefix
from specengine.utils.model_files import is_gguf

__all__ = [
    "Checkpoint",
    "QuantisedCheckpoint",
    "RandomCheckpoint",
    "SafetensorsCheckpoint",
    "TensorInfo",
    "TorchBinCheckpoint",
    "expected_tensors",
    "open_checkpoint",
    "open_published",
    "validate_tensors",
]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens and validates a model: a folder of the Hugging Face layout, a .gguf file, or `random:<preset>`.

    Raises FileNotFoundError for a missing file and ValueError for any other fault.
    """
    try:
        checkpoint = _open(path)
        validate_tensors(checkpoint)
    except ValueError as error:
        if is_gguf(Path(path)) and of_ollama(Path(path)):
            raise ValueError(f"{error}; {OLLAMA_HINT}") from error
        raise
    return checkpoint


def open_published(folder: str | Path) -> Checkpoint:
    """Opens a folder of a hybrid under the names, and with the values, of its family's files: a matrix per expert.

    The drafter's tensors are among them. Raises FileNotFoundError and ValueError.
    """
    return with_ends(named_experts(HybridTensors(with_prefix(_open_folder(Path(folder))), published=True)))


def _open(path: str | Path) -> Checkpoint:
    name = str(path)
    if name.startswith("random:"):
        preset = name.removeprefix("random:")
        if preset not in PRESETS:
            raise ValueError(f"model: unknown preset {preset!r}; expected one of {', '.join(PRESETS)}")
        return RandomCheckpoint(PRESETS[preset], source=name)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a checkpoint folder, a .gguf file or random:<preset>")
    if not path.is_dir():
        if not is_gguf(path):
            raise ValueError(f"{path}: expected a checkpoint folder or a GGUF file")
        file = GGUFCheckpoint(path)
        return HybridTensors(file, folded=True) if file.config.architecture == "qwen3_next" else file
    return with_ends(named_experts(named_hybrid(with_prefix(_open_folder(path)))))


def _open_folder(path: Path) -> Checkpoint:
    """Opens a folder, its tensors as they are stored."""
    settings = read_settings(path)
    for kind in (SafetensorsCheckpoint, TorchBinCheckpoint):
        if any((path / f"{kind.filename}{suffix}").is_file() for suffix in (".index.json", "")):
            if settings is None:
                return kind(path)
            if kind is TorchBinCheckpoint:
                raise ValueError(f"{path}: quantised weights must be in model.safetensors, not in {kind.filename}")
            return QuantisedCheckpoint(path, settings)
    raise FileNotFoundError(
        f"{path}: holds neither model.safetensors nor pytorch_model.bin, nor the .index.json of either"
    )
