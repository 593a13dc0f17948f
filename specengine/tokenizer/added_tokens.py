"""Tokens that a model folder adds to its vocabulary: the files that name them, and their ids, as in `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from specengine.tokenizer.backend_limits import library_errors
from specengine.utils.json_file import read_json_object

_IDS = "added_tokens_decoder"
_EXTRA, _LEGACY_EXTRA = "extra_special_tokens", "additional_special_tokens"
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class AddedTokens:
    """The tokens that the JSON files beside a vocabulary name.

    listed: tokens with an id, and the file that lists them. named: special tokens by key, such as `bos_token`.
    extra: further special tokens. folder: of the files.
    """

    listed: dict[int, tuple[AddedToken, Path]]
    named: dict[str, AddedToken]
    extra: list[AddedToken]
    folder: Path

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Adds the tokens, and changes the flags of known ones to those listed. One without an id gets the next.

        Raises ValueError naming file and token if a token would get another id than listed.
        """
        known = backend.get_added_tokens_decoder().values()
        flags = {repr(token) for token in known}
        new = [self.listed[index][0] for index in sorted(self.listed)]
        texts = {token.content for token in (*known, *new)}
        beside = {repr(token): token for token in (*self.named.values(), *self.extra)}  # the first of equal ones
        new += [token for token in beside.values() if token.content not in texts]
        special = {token.content for token in known if token.special}  # the library never forgets that
        special |= {token.content for token in self.named.values()}
        for token in new:
            if token.content in special:
                token.special = True
        new = [token for token in new if repr(token) not in flags]  # of several with one text the last one counts
        with library_errors(f"{self.folder}: cannot add tokens"):
            backend.add_tokens(new)
        for index, (token, path) in self.listed.items():
            if (got := backend.token_to_id(token.content)) != index:
                raise ValueError(
                    f"{path}: added token {token.content!r} has id {index} but would become {got}; expected the "
                    f"id that the vocabulary gives it, or the next one after all others"
                )


def read_added_tokens(folder: Path, config: Mapping[str, Any], known: Mapping[int, AddedToken] | None) -> AddedTokens:
    """Reads them from tokenizer_config.json, and from the older files if it lists no ids.

    known: tokens that tokenizer.json adds, by id. None for a folder with tokenizer.model: listed tokens are then
    matched in the text as it is, so that a space precedes what follows them.
    Raises ValueError naming file and token.
    """
    path = folder / "tokenizer_config.json"
    values = dict(config)
    if _LEGACY_EXTRA in values and not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_LEGACY_EXTRA)
    further = [name for name, value in values.items() if _is_further(name) and isinstance(value, str)]
    named = {name: values.pop(name) for name in further}
    if isinstance(values.get(_EXTRA), dict):
        named |= values.pop(_EXTRA)
    if _IDS in values:
        listed = {}
        for index, entry in _object(values[_IDS] or {}, f"{path}: {_IDS}").items():
            where = f"{path}: {_IDS}[{index!r:.80}]"
            entry = _object(entry, where) | ({"normalized": False} if known is None else {})
            listed[_id(index, where)] = (_token(entry, where, special=False), path)
    else:
        _merge_special_tokens(values, folder)
        if isinstance(values.get(_EXTRA), dict):
            named |= values.pop(_EXTRA)
        listed = _legacy_ids(values, folder, known)
    if _LEGACY_EXTRA in values and _EXTRA not in values:
        values[_EXTRA] = values[_LEGACY_EXTRA]
    extra = _list(values.get(_EXTRA), f"{path}: {_EXTRA}")
    texts = {name: values[name] for name in _STANDARD if values.get(name) is not None}
    texts |= {name: value for name, value in values.items() if _is_further(name) and _describes_token(value)} | named
    return AddedTokens(
        listed,
        {name: token for name, value in texts.items() if (token := _token(value, f"{path}: {name}")).content},
        [_token(value, f"{path}: {_EXTRA}[{at}]") for at, value in enumerate(extra)],
        folder,
    )


def _merge_special_tokens(values: dict[str, Any], folder: Path) -> None:
    """Merges special_tokens_map.json into the values of tokenizer_config.json."""
    path = folder / "special_tokens_map.json"
    for name, value in (read_json_object(path) if path.is_file() else {}).items():
        where = f"{path}: {name}"
        if name in (_EXTRA, _LEGACY_EXTRA) and isinstance(value, list):
            value = [_token(each, f"{where}[{at}]") for at, each in enumerate(value)]
            if name == _EXTRA:
                value = _list(values.get(name), where) + value
        elif isinstance(value, dict) and name != _EXTRA:
            value = _token({**value, "special": True}, where)
        elif name in _STANDARD and value is not None:
            value = _token(value, where)
        values[name] = value


def _legacy_ids(
    values: Mapping[str, Any], folder: Path, known: Mapping[int, AddedToken] | None
) -> dict[int, tuple[AddedToken, Path]]:
    """Returns the tokens of added_tokens.json and of tokenizer.json. Special are those that others name so."""
    path = folder / "added_tokens.json"
    special = [values.get(name) for name in _STANDARD] + _list(values.get(_EXTRA), f"{folder}: {_EXTRA}")
    texts = [value.content if isinstance(value, AddedToken) else value for value in special]
    listed = {index: (token, folder / "tokenizer.json") for index, token in (known or {}).items()}
    for text, index in (read_json_object(path) if path.is_file() else {}).items():
        where = f"{path}: {text!r:.80}"
        if type(index) is not int:
            raise ValueError(f"{where} must have a token id, got {index!r:.80}")
        if index not in listed:
            entry = {"content": text, "normalized": known is not None and text not in texts}
            listed[index] = (_token(entry, where, special=text in texts), path)
        elif listed[index][0].content != text:
            raise ValueError(f"{where} has id {index}, as {listed[index][0].content!r} in {listed[index][1].name}")
    return listed


def _is_further(name: str) -> bool:
    return name.endswith("_token") and name not in _STANDARD


def _describes_token(value: Any) -> bool:
    return isinstance(value, str | AddedToken) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _list(value: Any, where: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where} must be a list of tokens or an object, got {value!r:.80}")
    return value or []


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {value!r:.80}")
    return value


def _id(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where}: the key is no token id") from None


def _token(value: Any, where: str, special: bool = True) -> AddedToken:
    """Makes a token of its text or description.  special: unless the description says otherwise."""
    if isinstance(value, AddedToken):
        return value
    fields = {"content": value} if isinstance(value, str) else _object(value, where)
    content = fields.get("content")
    if not isinstance(content, str):
        raise ValueError(f"{where}: expected a text or an object with the text `content`, got {value!r:.80}")
    with library_errors(where):
        flags = {name: fields[name] for name in _FLAGS if name in fields}
        return AddedToken(content, special=fields.get("special", special and "__type" not in fields), **flags)
