"""The tokenizer in the metadata of a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import methodcaller
from typing import Any

import tokenizers
from tokenizers import decoders, models

from specengine.tokenizer.backend_limits import check_entries, library_errors
from specengine.tokenizer.pre_tokenizers import rules_for
from specengine.tokenizer.sentencepiece_bpe import TokenType, added_tokens, build_backend
from specengine.tokenizer.vocabulary import TemplateFile, Vocabulary, choose_template

_PREFIX = "tokenizer.ggml."
NAME_KEYS = ("general.name", "general.basename", "general.finetune")  # parts of the model's name


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Reads the tokenizer of a GGUF file.

    metadata: GGUF keys with Python values; arrays are lists.
    Raises ValueError naming the key that is missing, malformed or unsupported.
    """
    kind = metadata.get(_PREFIX + "model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model must be 'gpt2' or 'llama', got {kind!r}")
    tokens = _array(metadata, "tokens", str)
    check_entries(tokens, _PREFIX + "tokens")
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise ValueError(f"tokenizer.ggml.tokens has the token {twice!r} twice")
    types = _array(metadata, "token_type", int, len(tokens)) or [int(TokenType.NORMAL)] * len(tokens)
    backend, adds_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, tokens, types)

    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    ends = [*(ids[name] for name in ("eos", "eot", "eom")), *_end_ids(metadata, len(tokens))]
    return Vocabulary(
        backend=backend,
        source="GGUF metadata",
        size=len(tokens),
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(dict.fromkeys(index for index in ends if index is not None)),
        add_bos=bool(metadata.get(_PREFIX + "add_bos_token", adds_bos and ids["bos"] is not None)),
        add_eos=bool(metadata.get(_PREFIX + "add_eos_token", False)),
        special_tokens={f"{name}_token": tokens[i] for name in ("bos", "eos") if (i := ids[name]) is not None},
        chat_template=_chat_template(metadata),
        model_name=" ".join(str(metadata.get(key, "")) for key in NAME_KEYS),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    rules = rules_for(metadata.get(_PREFIX + "pre", "default"))
    texts = _array(metadata, "merges", str)
    if set(map(methodcaller("count", " "), texts)) - {1}:
        malformed = next(text for text in texts if text.count(" ") != 1)
        raise ValueError(f"tokenizer.ggml.merges must be pairs separated by one space, got {malformed!r}")
    parts = " ".join(texts).split(" ")
    merges = list(zip(parts[::2], parts[1::2], strict=False))  # of no texts, parts is one empty string
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    with library_errors("tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"):
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer
    backend.pre_tokenizer = rules.words()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(added_tokens(tokens, types))
    return backend, rules.adds_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    scores = _array(metadata, "scores", (int, float), len(tokens))
    if not scores:
        raise ValueError("tokenizer.ggml.scores is missing: a 'llama' vocabulary needs a score per token")
    add_space_prefix = bool(metadata.get(_PREFIX + "add_space_prefix", True))
    with library_errors("tokenizer.ggml.tokens are no sentencepiece vocabulary"):
        return build_backend(tokens, scores, types, add_space_prefix=add_space_prefix), True


def _array(metadata: Mapping[str, Any], name: str, kind: type | tuple[type, ...], length: int | None = None) -> list:
    values = metadata.get(_PREFIX + name)
    if values is None and length is not None:
        return []
    if not isinstance(values, Sequence) or not all(issubclass(each, kind) for each in set(map(type, values))):
        expected = "strings" if kind is str else "numbers"
        raise ValueError(f"tokenizer.ggml.{name} must be a list of {expected}, got {type(values).__name__}")
    if length is not None and len(values) != length:
        raise ValueError(f"tokenizer.ggml.{name} has {len(values)} entries, expected one per token ({length})")
    return list(values)


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    index = metadata.get(f"{_PREFIX}{name}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < count:
        raise ValueError(f"tokenizer.ggml.{name}_token_id must be a token id below {count}, got {index!r}")
    return index


def _end_ids(metadata: Mapping[str, Any], count: int) -> list[int]:
    """Returns the list that Ollama writes. Ids beyond the vocabulary end nothing."""
    ids = _array(metadata, "eos_token_ids", int) if _PREFIX + "eos_token_ids" in metadata else []
    return [index for index in ids if 0 <= index < count]


def _chat_template(metadata: Mapping[str, Any]) -> TemplateFile | None:
    key = "tokenizer.chat_template"
    named = {name[len(key) + 1 :]: value for name, value in metadata.items() if name.startswith(key + ".")}
    return choose_template(named | ({"default": metadata[key]} if key in metadata else {}), key)
