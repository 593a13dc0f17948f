"""The tokenizer of a model folder: tokenizer.json or tokenizer.model, and the JSON files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from specengine.tokenizer.backend_limits import library_errors
from specengine.tokenizer.sentencepiece_bpe import read_model_file
from specengine.tokenizer.vocabulary import Vocabulary, choose_template
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
    else:
        path = folder / "tokenizer.model"
        # A config without `legacy` predates that key; a space then followed every special token.
        backend, bos, eos = read_model_file(path, first_segment_only=not fields.get("legacy", bool, True))
        _add_tokens(backend, folder, config)

    texts = _special_texts(folder, config)
    bos = _id_of(backend, texts, "bos_token", folder, bos)
    eos = _id_of(backend, texts, "eos_token", folder, eos)
    for name, index in (("bos_token", bos), ("eos_token", eos)):
        if index is not None and (token := backend.id_to_token(index)) is not None:
            texts[name] = token
    template, template_source = _chat_template(folder, config)
    # tokenizer.model does not say whether BOS precedes a text; by convention it does.
    convention = bos is not None if path.name == "tokenizer.model" else None
    return Vocabulary(
        backend=backend,
        source=str(path),
        size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_token_id=bos,
        eos_token_ids=_eos_ids(folder, eos),
        add_bos=fields.get("add_bos_token", bool, convention),
        add_eos=fields.get("add_eos_token", bool, None),
        special_tokens=texts,
        chat_template=template,
        template_source=template_source,
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


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Adds the tokens that only the JSON files list. Raises ValueError if a token would get another id."""
    added: dict[int, AddedToken] = {}
    special = set(_special_texts(folder, config).values())
    with library_errors(f"{folder / 'added_tokens.json'}: expected an object of token ids"):
        for token, index in _read_json(folder / "added_tokens.json").items():
            added[int(index)] = AddedToken(token, special=token in special, normalized=False)
    with library_errors(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder: expected tokens by id"):
        for index, entry in (config.get("added_tokens_decoder") or {}).items():
            options = {name: entry[name] for name in ("special", "lstrip", "rstrip", "single_word") if name in entry}
            added[int(index)] = AddedToken(entry["content"], normalized=False, **options)
    for index in sorted(added):
        backend.add_tokens([added[index]])
        if (got := backend.token_to_id(added[index].content)) != index:
            raise ValueError(f"{folder}: added token {added[index].content!r} has id {index} but would become {got}")


def _special_texts(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    texts = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                texts[name] = text
    return texts


def _id_of(
    backend: tokenizers.Tokenizer, texts: dict[str, str], name: str, folder: Path, default: int | None
) -> int | None:
    if name not in texts:
        return default
    with library_errors(f"{folder / 'tokenizer_config.json'}: {name}"):
        index = backend.token_to_id(texts[name])
    if index is None:
        raise ValueError(f"{folder / 'tokenizer_config.json'}: {name} {texts[name]!r} is not in the vocabulary")
    return index


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


def _chat_template(folder: Path, config: dict[str, Any]) -> tuple[str | None, str]:
    """Returns the template and its file, in the order of precedence of `transformers`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text: {error}") from None
    for name, content in (("tokenizer_config.json", config), ("chat_template.json", None)):
        path = folder / name
        value = (_read_json(path) if content is None else content).get("chat_template")
        if isinstance(value, str):
            return value, str(path)
        if isinstance(value, dict):
            value = [{"name": key, "template": text} for key, text in value.items()]
        if value is not None:
            try:
                named = [(entry["name"], entry["template"]) for entry in value]
                if not all(isinstance(text, str) for entry in named for text in entry):
                    raise TypeError
            except (TypeError, KeyError):
                raise ValueError(f"{path}: chat_template must be a string or a list of named templates") from None
            return choose_template(named, str(path)), str(path)
    return None, ""


def model_name(folder: Path) -> str:
    """Returns the name of a model folder and the one in its config.json, which may be empty."""
    folder = folder.resolve()
    # A download cache names the folder by revision; the model's name is two levels up.
    name = folder.parent.parent.name if folder.parent.name == "snapshots" else folder.name
    return f"{name} {_read_json(folder / 'config.json').get('_name_or_path', '')}"
