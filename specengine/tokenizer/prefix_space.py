"""The space that some tokenizers put before a text: `add_prefix_space` of tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

# Classes of `transformers` that split text into words themselves. Others leave it to tokenizer.json.
_BYTE_LEVEL = {"CodeGen", "Cohere", "GPT2", "GPTNeoX", "Qwen2", "Qwen3_5", "Roberta", "Whisper"}
_SENTENCEPIECE = {"CodeLlama", "Llama"}
_MODEL_TYPES = {"gpt2": "GPT2", "phi": "GPT2", "gpt_neox": "GPTNeoX", "qwen2": "Qwen2", "qwen3": "Qwen2"}
_NO_SPACE: dict[str, dict[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "Prepend": {"prepend": ""},
    "Strip": {"start": 0},
}


def set_prefix_space(backend: tokenizers.Tokenizer, wanted: bool | None, tokenizer_class: str, model_type: str) -> None:
    """Changes a backend as the class of its tokenizer does.

    wanted: None if the folder does not say.  tokenizer_class, model_type: empty if unknown.
    """
    family = tokenizer_class.removesuffix("Fast").removesuffix("Tokenizer") or _MODEL_TYPES.get(model_type, "")
    if family in _BYTE_LEVEL:
        _change(backend, "pre_tokenizer", {"ByteLevel": {"add_prefix_space": bool(wanted)}})
    elif family in _SENTENCEPIECE and wanted is False:
        for name in ("normalizer", "pre_tokenizer", "decoder"):
            _change(backend, name, _NO_SPACE)


def _change(backend: tokenizers.Tokenizer, name: str, values: Mapping[str, dict[str, Any]]) -> None:
    """Sets values of the steps of a part, by their type."""
    part: Any = getattr(backend, name)  # a copy
    if part is not None:
        part.__setstate__(json.dumps(_changed(json.loads(part.__getstate__()), values)).encode())
        setattr(backend, name, part)


def _changed(step: dict[str, Any], values: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    for steps in ("pretokenizers", "normalizers", "decoders"):
        if steps in step:
            return {**step, steps: [_changed(each, values) for each in step[steps]]}
    return {**step, **values.get(step["type"], {})}
