"""Writes the tokenizer of a GGUF file as the files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specengine.models.checkpoint import Checkpoint
from specengine.tokenizer.gguf_vocab import read_gguf_vocabulary


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json; none for a source without tokenizer.

    Raises ValueError naming the metadata that are missing, malformed or unsupported.
    """
    config = checkpoint.config
    ends, bos = list(config.eos_token_ids), config.bos_token_id
    if checkpoint.metadata is not None and "tokenizer.ggml.model" in checkpoint.metadata:
        vocabulary = read_gguf_vocabulary(checkpoint.metadata)
        vocabulary.backend.save(str(folder / "tokenizer.json"))
        _write(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": vocabulary.add_bos,
                "add_eos_token": vocabulary.add_eos,
                "chat_template": vocabulary.chat_template and vocabulary.chat_template.text,
                **vocabulary.special_tokens,
            },
        )
        ends = list(dict.fromkeys([*ends, *vocabulary.eos_token_ids]))
    _write(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": ends or None})


def _write(path: Path, values: dict[str, Any]) -> None:
    known = {key: value for key, value in values.items() if value is not None}
    path.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
