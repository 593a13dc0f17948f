"""Keys and names in GGUF files that other programs than llama.cpp's converter wrote, in the converter's terms."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from specengine.models.gguf_file import GGUFFile

OLLAMA_HINT = (
    "the file looks like one of Ollama, whose converter has layouts of its own; a GGUF file of this model that "
    "llama.cpp's converter wrote may load"
)
# endings of keys that Ollama's converter alone writes, and its name of gpt-oss
_OLLAMA_KEYS = (
    *(".ssm.v_head_reordered", ".rope.mrope_interleaved", ".vision.block_count", ".norm_top_k_prob"),
    *("tokenizer.ggml.eos_token_ids", "gptoss.block_count"),
)
_OLLAMA_BLOB = re.compile(r"sha256[-:][0-9a-f]{64}")
_SPECIAL = ("bos", "eos", "eot", "eom")
_ENDS = "tokenizer.ggml.eos_token_ids"  # Ollama's list
# of towers for pictures and sound, projectors, and Ollama's drafters
_BESIDE = ("v.", "a.", "mm.", "mtp.", "resampler.", "model.image_newline")
_VECTOR = re.compile(r"(blk\.\d+)\.(ssm_a|ssm_dt)(?:\.weight|\.bias)?")
_VECTORS = {"ssm_a": "ssm_a", "ssm_dt": "ssm_dt.bias"}


def normal_metadata(file: GGUFFile) -> dict[str, Any]:
    """Returns a file's metadata under the names of llama.cpp's converter, without tokens that the model lacks.

    Warns of every token that is left out. Raises ValueError for a layout that is not known.
    """
    metadata = dict(file.metadata)
    if metadata.get("general.architecture") == "gptoss":
        metadata = _gpt_oss_of_ollama(file)
    tokens, embedding = metadata.get("tokenizer.ggml.tokens"), file.tensors.get("token_embd.weight")
    size = len(tokens) if isinstance(tokens, list) else embedding.shape[0] if embedding else 0
    for kind in _SPECIAL:
        key = f"tokenizer.ggml.{kind}_token_id"
        if _is_beyond(metadata.get(key), size, key, file.path):
            del metadata[key]
            metadata.pop(f"tokenizer.ggml.add_{kind}_token", None)
    if isinstance(ends := metadata.get(_ENDS), list):
        metadata[_ENDS] = [token for token in ends if not _is_beyond(token, size, _ENDS, file.path)]
    return metadata


def is_beside(name: str) -> bool:
    """Returns whether a tensor is of another network than the language model."""
    return name.startswith(_BESIDE)


def normal_name(name: str) -> str:
    """Returns the converter's name of a tensor: other programs leave the ending out, or have another one."""
    if vector := _VECTOR.fullmatch(name):
        return f"{vector[1]}.{_VECTORS[vector[2]]}"
    name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
    return name.replace(".attn_out.", ".attn_output.")


def of_ollama(path: Path) -> bool:
    """Returns whether a file looks like one of Ollama: by its name, or by keys that only Ollama's converter writes."""
    if _OLLAMA_BLOB.fullmatch(path.name):
        return True
    with suppress(OSError, ValueError):
        return any(key.endswith(_OLLAMA_KEYS) for key in GGUFFile(path).metadata)
    return False


def _is_beyond(token: Any, size: int, key: str, path: Path) -> bool:
    if type(token) is not int or not size or 0 <= token < size:
        return False
    warnings.warn(f"{path}: {key} is {token}, but the vocabulary has {size} tokens; it is not used", stacklevel=5)
    return True


def _gpt_oss_of_ollama(file: GGUFFile) -> dict[str, Any]:
    """Renames the keys of Ollama's gpt-oss; it lacks the type of rotary scaling, and names a wrong pre-tokenizer."""
    for name in file.tensors:
        if "ffn_gate_up_exps" in name:  # rows of both alternate, and codes have the order of folders
            raise ValueError(f"{file.path}: tensor '{name}' has gate and up in one, as only files of Ollama do")
    known = {re.sub(r"^gptoss\.", "gpt-oss.", key): value for key, value in file.metadata.items()}
    known.setdefault("gpt-oss.rope.scaling.type", "yarn")
    return known | {"general.architecture": "gpt-oss", "tokenizer.ggml.pre": "gpt-4o"}
