"""The tokenizer of a model folder: tokenizer.json or tokenizer.model, and the JSON files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from specengine.tokenizer.added_tokens import read_added_tokens
from specengine.tokenizer.backend_limits import library_errors
from specengine.tokenizer.prefix_space import set_prefix_space
from specengine.tokenizer.sentencepiece_bpe import read_model_file
from specengine.tokenizer.vocabulary import TemplateFile, Vocabulary, choose_template
from specengine.utils.json_fields import Fields
from specengine.utils.json_file import read_json_object

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def has_vocabulary(folder: Path) -> bool:
    """Returns whether the folder holds tokenizer.json or tokenizer.model."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_folder_vocabulary(folder: Path) -> Vocabulary:
    """Reads the tokenizer of a model folder.

    Raises FileNotFoundError without a folder or tokenizer, and ValueError naming a malformed file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not has_vocabulary(folder):
        raise FileNotFoundError(f"{folder}: no tokenizer; expected {' or '.join(TOKENIZER_FILES)}")
    config = _read_json(folder / "tokenizer_config.json")
    fields = Fields(config, str(folder / "tokenizer_config.json"))
    bos = eos = None
    path = folder / "tokenizer.json"
    if path.is_file():
        backend = _read_backend(path)
        added = read_added_tokens(folder, config, backend.get_added_tokens_decoder())
    else:
        path = folder / "tokenizer.model"
        # A config without `legacy` predates that key; a space then followed every special token.
        backend, bos, eos = read_model_file(path, first_segment_only=not fields.get("legacy", bool, True))
        added = read_added_tokens(folder, config, None)
    model_type = _read_json(folder / "config.json").get("model_type")
    set_prefix_space(
        backend,
        fields.get("add_prefix_space", bool, None),
        fields.get("tokenizer_class", str, ""),
        model_type if isinstance(model_type, str) else "",
    )
    added.add_to(backend)
    backend.encode_special_tokens = fields.get("split_special_tokens", bool, False)

    texts = {name: token.content for name, token in added.named.items()}
    bos, eos = (
        backend.token_to_id(texts[name]) if name in texts else default
        for name, default in (("bos_token", bos), ("eos_token", eos))
    )
    for name, index in (("bos_token", bos), ("eos_token", eos)):
        if index is not None and name not in texts and (text := backend.id_to_token(index)) is not None:
            texts[name] = text
    # tokenizer.model does not say whether BOS precedes a text; by convention it does.
    convention = bos is not None if path.name == "tokenizer.model" else None
    return Vocabulary(
        backend=backend,
        source=str(path),
        size=_size(backend, path),
        bos_token_id=bos,
        eos_token_ids=_eos_ids(folder, eos),
        add_bos=fields.get("add_bos_token", bool, convention),
        add_eos=fields.get("add_eos_token", bool, None),
        special_tokens=texts,
        chat_template=_chat_template(folder, config),
        model_name=model_name(folder),
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    with library_errors(f"{path}: not a valid tokenizer.json"):
        backend = tokenizers.Tokenizer.from_file(str(path))
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # dropout leaves out merges at random, for training
        backend.no_truncation()
        backend.no_padding()
    return backend


def _size(backend: tokenizers.Tokenizer, path: Path) -> int:
    """Returns one more than the highest id. Raises ValueError for two tokens of one id: they decode at random."""
    entries = backend.get_vocab(with_added_tokens=True)
    texts = {index: text for text, index in entries.items()}
    if len(texts) < len(entries):
        twice = next(text for text, index in entries.items() if texts[index] != text)
        pair = ", ".join(sorted(repr(text) for text in (twice, texts[entries[twice]])))
        raise ValueError(f"{path}: tokens {pair} have one id, {entries[twice]}; expected an id for each")
    return max(texts, default=-1) + 1


def _eos_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    """Returns the end tokens of the tokenizer and generation_config.json; if there are none, those of config.json."""
    found = [] if eos is None else [eos]
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(isinstance(index, int) for index in ids):
            raise ValueError(f"{folder / name}: eos_token_id must be a token id or a list of them, got {ids!r}")
        if name == "generation_config.json" or not found:
            found += ids
    return tuple(dict.fromkeys(found))


def _chat_template(folder: Path, config: dict[str, Any]) -> TemplateFile | None:
    """Returns the template and its file, in the order of precedence of `transformers`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return TemplateFile(str(path), path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            return TemplateFile(str(path), None, f"not UTF-8 text: {error}")
    for name, content in (("tokenizer_config.json", config), ("chat_template.json", None)):
        path = folder / name
        value = (_read_json(path) if content is None else content).get("chat_template")
        if isinstance(value, list) and all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in value):
            value = {entry["name"]: entry.get("template") for entry in value}
        if value is not None:
            return choose_template(value if isinstance(value, dict) else {"default": value}, str(path))
    return None


def model_name(folder: Path) -> str:
    """Returns the name of a model folder and the one in its config.json, which may be empty."""
    folder = folder.resolve()
    # A download cache names the folder by revision; the model's name is two levels up.
    name = folder.parent.parent.name if folder.parent.name == "snapshots" else folder.name
    return f"{name} {_read_json(folder / 'config.json').get('_name_or_path', '')}"
