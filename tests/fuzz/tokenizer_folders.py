"""Harness: folders that add tokens at random. They decode as with `transformers`, or are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer

from specengine import tokenizer
from tests.fuzz.contract import Harness
from tests.fuzz.mutations import damaged_bytes, damaged_json
from tests.tokenizer.folder_layouts import (
    SIZES,
    decode_saved,
    difference,
    reference,
    reference_class,
    vocabulary,
    with_tokens,
    write,
)

_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_TEXTS = ("<|im_start|>", "<|im_end|>", "<pad>", "<tool>", "ABC", "he llo", "\u2581\u2581", " x", "th", "<s>", "</s>")
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "image_token", "eot_token")
_CLASSES = (None, None, "PreTrainedTokenizerFast", "TokenizersBackend")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


def _random_folder(draw: Random) -> dict[str, Any]:
    backend, own = draw.choice([*SIZES]), draw.sample(_TEXTS, draw.choice((0, 0, 1, 3)))
    saved = with_tokens(backend, *(AddedToken(**_random_token(draw, text)) for text in own)) if own else backend
    config: dict[str, Any] = {"tokenizer_class": draw.choice(_CLASSES)}
    old: dict[str, Any] = {}
    files = {"tokenizer.json": saved, "tokenizer_config.json": config}
    known = draw.sample(_TEXTS, draw.randrange(6))
    ids = _right_ids(vocabulary(backend) if saved == backend else Tokenizer.from_str(saved).get_vocab(), known)
    if known and draw.random() < 0.1:
        ids[draw.choice(known)] = draw.choice((-1, 0, 1, 97, 258, 300, 2**31, 2**64))
    if draw.random() < 0.5:
        config["added_tokens_decoder"] = {str(ids[text]): _random_token(draw, text) for text in known}
    elif draw.random() < 0.7:
        files["added_tokens.json"] = {text: ids[text] for text in known}
    for place in (config, old):
        for name in draw.sample(_NAMES, draw.choice((0, 0, 1, 3))):
            text = draw.choice(_TEXTS)
            place[name] = draw.choice((text, text, {**_random_token(draw, text), "__type": "AddedToken"}, None))
        if draw.random() < 0.4:
            extra = draw.sample(_TEXTS, draw.randrange(4))
            name = draw.choice(("additional_special_tokens", "extra_special_tokens"))
            named = {f"{number}_token": text for number, text in enumerate(extra)}
            place[name] = extra if draw.random() < 0.8 else named
    for name in ("add_prefix_space", "split_special_tokens"):
        if draw.random() < 0.1:
            config[name] = draw.random() < 0.5
    return files | {"special_tokens_map.json": old} if draw.random() < 0.4 else files


def _right_ids(entries: Mapping[str, int], texts: Sequence[str]) -> dict[str, int]:
    """Returns the ids that the texts have, or get in their order after all others."""
    new = [text for text in texts if text not in entries]
    ids = dict(zip(new, count(max(entries.values()) + 1), strict=False))
    return ids | {text: entries[text] for text in texts if text in entries}


def _random_token(draw: Random, text: str) -> dict[str, Any]:
    return {"content": text} | {name: draw.random() < 0.3 for name in _FLAGS}


def _mutation(_: Sequence[bytes], draw: Random) -> bytes:
    files = _random_folder(draw)
    if draw.random() < 0.1:
        name = draw.choice([*files])
        files[name] = damaged_bytes([json.dumps(files[name]).encode()], draw).decode("utf-8", "replace")
    data = json.dumps(files).encode()
    return damaged_json([data], draw) if draw.random() < 0.3 else data


def _seeds() -> list[bytes]:
    return [json.dumps(_random_folder(Random(seed))).encode() for seed in range(4)]


def _use(path: Path) -> None:
    try:
        files = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    if not isinstance(files, dict) or not isinstance(files.get("tokenizer.json"), str):
        return
    folder = path.parent / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, {name: files[name] for name in _FILES if name in files})
    ours = tokenizer.Tokenizer.from_folder(folder)
    reference_class(None)  # fails without the package
    try:
        theirs = reference(folder)
    except Exception:  # what `transformers` refuses has no reference
        return
    problem = difference(ours, theirs, decode_saved(theirs, folder))
    assert problem is None, problem


HARNESSES = (
    Harness("tokenizer folder", _seeds, _use, ("layouts/folder",), "layouts/files.json", _mutation, 64, 16 << 20),
)
