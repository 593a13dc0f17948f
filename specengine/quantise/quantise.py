"""Writes a model in a quantised format: the work of `specengine quantize`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint import Checkpoint, open_checkpoint, open_published
from specengine.models.gated_delta.hf_config import HYBRIDS
from specengine.quantise.folder_writer import write_folder
from specengine.quantise.source import Progress, Source

GGUF_TARGETS = ("q4_1", "q8_0")
FOLDER_TARGETS = ("int4-g128", "fp8-block")
TARGETS = (*GGUF_TARGETS, *FOLDER_TARGETS)


@dataclass(frozen=True)
class Outcome:
    """What was written. size: bytes of the file, or of all files of the folder."""

    tensors: int
    size: int
    seconds: float


def quantise(
    model: str | Path, to: str, out: Path, *, overwrite: bool = False, progress: Progress | None = None
) -> Outcome:
    """Writes a model as `to`, one of TARGETS, tensor by tensor.

    out: a .gguf file for q4_1 and q8_0, else a folder; it appears when it is complete.
    Raises ValueError for a target, place or model that does not fit, FileNotFoundError, ModelFetchError or OSError.
    """
    if to not in TARGETS:
        raise ValueError(f"to: expected one of {', '.join(TARGETS)}, got {to!r}")
    started = perf_counter()
    path = resolve_model(model)
    _check_place(out, to, Path(path), overwrite)
    checkpoint = open_checkpoint(path)
    folder = Path(path) if Path(path).is_dir() else None
    hybrid = checkpoint.config.architecture in HYBRIDS
    if hybrid:
        _check_hybrid(checkpoint, to, folder)
    source = Source(checkpoint, folder)
    if hybrid and folder is not None and to in FOLDER_TARGETS:
        source = Source(open_published(folder), folder, published=True)
    if progress:
        source = replace(source, progress=progress)
    if to in GGUF_TARGETS:
        from specengine.quantise.gguf_writer import write_gguf  # only GGUF files need the gguf package

        write_gguf(source, to, out)
    else:
        write_folder(source, to, out)
    files = [out] if out.is_file() else list(out.iterdir())
    return Outcome(len(source.shapes), sum(file.stat().st_size for file in files), perf_counter() - started)


def _check_hybrid(checkpoint: Checkpoint, to: str, folder: Path | None) -> None:
    where, architecture = checkpoint.source, checkpoint.config.architecture
    if to in FOLDER_TARGETS and folder is None:
        raise ValueError(f"{where}: {to} of {architecture}, a hybrid, is written from a checkpoint folder alone")
    if to in GGUF_TARGETS and architecture == "qwen3_next":
        raise ValueError(
            f"{where}: GGUF files of qwen3_next cannot be written yet, expected --to int4-g128 or fp8-block "
            "from a checkpoint folder"
        )


def _check_place(out: Path, to: str, model: Path, overwrite: bool) -> None:
    is_file = to in GGUF_TARGETS
    if is_file != (out.suffix.lower() == ".gguf"):
        expected = "a file ending in .gguf" if is_file else "a folder"
        raise ValueError(f"out: {to} is written to {expected}, got {str(out)!r}")
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"out: {str(out)!r} exists; --overwrite replaces it")
    if out.is_dir() == is_file:
        raise ValueError(f"out: {str(out)!r} is not {'a file' if is_file else 'a folder'}")
    if model.exists() and out.resolve() in (model.resolve(), *model.resolve().parents):
        raise ValueError(f"out: {str(out)!r} holds the model that is read")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise ValueError(f"out: {str(out)!r} holds something else than a model; it stays as it is")
