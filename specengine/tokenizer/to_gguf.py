"""The tokenizer of a model folder as metadata of a GGUF file: the inverse of gguf_vocab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from specengine.tokenizer.detokenizer import PieceDecoder
from specengine.tokenizer.folder_vocab import read_folder_vocabulary
from specengine.tokenizer.pre_tokenizers import rules_for
from specengine.tokenizer.sentencepiece_bpe import TokenType, read_pieces
from specengine.tokenizer.tokenizer import Tokenizer
from specengine.tokenizer.vocabulary import Vocabulary

_PREFIX = "tokenizer.ggml."
_END_KEYS = ("eos", "eot", "eom")
_LOWEST = -1000.0  # score of an entry that no merge makes
# One name for each of the known rules, which this text tells apart.
_PRE_NAMES = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "deepseek-coder", "deepseek-llm")
_PROBE = (
    "I'LL  say: we've 3 cats,12345678 dogs & camelCase HTTPServer/x\t\n\n  \u00e9 e\u0301 \u4f60\u597d,\u4e16\u754c "
    "\u041f\u0440\u0438\u0432\u0435\u0442! #1\u00bd  \r\n foo_bar(){}//\n/ \u3053\u3093 \U0001f999 'tis "
)


def gguf_metadata(folder: Path, count: int, ends: tuple[int, ...] = ()) -> dict[str, Any]:
    """Returns the tokenizer of a model folder as GGUF keys with Python values.

    count: rows of the embedding; ids without an entry get unused ones.  ends: ids that end a text, beside the
    tokenizer's own.
    Raises ValueError for a tokenizer that a GGUF file cannot describe, naming its file; else as Tokenizer.from_folder.
    """
    vocabulary = read_folder_vocabulary(folder)
    backend, source = vocabulary.backend, vocabulary.source
    if vocabulary.size > count:
        raise ValueError(f"{source}: has {vocabulary.size} entries, but the embedding has {count} rows")
    if PieceDecoder.from_backend(backend.decoder, source).byte_level:
        values = _byte_level(backend, count, source)
    elif (folder / "tokenizer.model").is_file():
        values = _sentencepiece(folder / "tokenizer.model", backend, count)
    else:
        raise ValueError(
            f"{source}: expected a byte-level BPE vocabulary, or tokenizer.model beside it, to write a GGUF file"
        )
    values |= _special_ids(vocabulary, ends)
    metadata = {_PREFIX + key: value for key, value in values.items()}
    if vocabulary.chat_template is not None and vocabulary.chat_template.text is not None:
        metadata["tokenizer.chat_template"] = vocabulary.chat_template.text
    metadata["general.name"] = vocabulary.model_name.strip()
    ours, theirs = Tokenizer(vocabulary), Tokenizer.from_gguf(metadata)
    if ours.encode(_PROBE) != theirs.encode(_PROBE):
        raise ValueError(f"{source}: a GGUF file would split text into other tokens")
    return metadata


def _byte_level(backend: tokenizers.Tokenizer, count: int, source: str) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE":
        raise ValueError(f"{source}: expected a BPE vocabulary, got {model['type']}")
    if not model["merges"]:
        raise ValueError(f"{source}: has no merges, and GGUF has no byte-level vocabulary without")
    tokens, types = _entries(backend, [], [], count, source)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    pre = _pre_name(backend, bool(model.get("ignore_merges")), source)
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}


def _pre_name(backend: tokenizers.Tokenizer, ignore_merges: bool, source: str) -> str:
    def words(normalizer: Any, splitter: Any) -> list:
        return splitter.pre_tokenize_str(normalizer.normalize_str(_PROBE) if normalizer else _PROBE)

    if backend.pre_tokenizer is not None:
        wanted = words(backend.normalizer, backend.pre_tokenizer)
        for name in _PRE_NAMES:
            rules = rules_for(name)
            if rules.ignore_merges == ignore_merges and words(rules.normalizer, rules.words()) == wanted:
                return name
    raise ValueError(f"{source}: splits text into words unlike {', '.join(_PRE_NAMES)}; GGUF has no name for its rules")


def _sentencepiece(path: Path, backend: tokenizers.Tokenizer, count: int) -> dict[str, Any]:
    pieces = read_pieces(path)
    tokens, types = _entries(backend, pieces.tokens, pieces.types, count, str(path))
    scores = pieces.scores + [_LOWEST] * (count - len(pieces.scores))
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": pieces.add_space_prefix,
    }


def _entries(
    backend: tokenizers.Tokenizer, tokens: list[str], types: list[TokenType], count: int, source: str
) -> tuple[list[str], list[int]]:
    """Completes the entries of a model file by those of a backend; unused entries fill the gaps."""
    added = backend.get_added_tokens_decoder()
    for index, token in added.items():
        text = token.content
        if index >= len(types) and token.normalized and backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        if token.lstrip or token.rstrip or token.single_word or text != token.content:
            raise ValueError(f"{source}: token {token.content!r} takes the spaces beside it, which GGUF cannot say")
    texts = {index: text for text, index in backend.get_vocab(with_added_tokens=True).items()}
    texts |= dict(enumerate(tokens))

    def kind(index: int) -> TokenType:
        if index in added and (index >= len(types) or types[index] == TokenType.NORMAL):
            return TokenType.CONTROL if added[index].special else TokenType.USER_DEFINED
        if index < len(types):
            return types[index]
        return TokenType.NORMAL if index in texts else TokenType.UNUSED

    return [texts.get(i, f"[PAD{i}]") for i in range(count)], [int(kind(i)) for i in range(count)]


def _special_ids(vocabulary: Vocabulary, ends: tuple[int, ...]) -> dict[str, Any]:
    ends = tuple(dict.fromkeys((*vocabulary.eos_token_ids, *ends)))
    if len(ends) > len(_END_KEYS):
        raise ValueError(f"{vocabulary.source}: {len(ends)} tokens end a text; a GGUF file has room for 3")
    bos = vocabulary.bos_token_id
    ids: dict[str, Any] = {f"{key}_token_id": index for key, index in zip(_END_KEYS, ends, strict=False)}
    if bos is not None:
        ids["bos_token_id"] = bos
    for key, name in (("unknown", "unk_token"), ("padding", "pad_token")):
        index = vocabulary.backend.token_to_id(vocabulary.special_tokens.get(name, ""))
        if index is not None:
            ids[f"{key}_token_id"] = index
    return ids | _frame(vocabulary, bos, ends[0] if ends else None)


def _frame(vocabulary: Vocabulary, bos: int | None, eos: int | None) -> dict[str, bool]:
    """Returns which tokens frame a text. Raises ValueError for others than BOS and EOS."""
    tokenizer = Tokenizer(vocabulary)
    bare, framed = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for adds_bos in (False, True):
        for adds_eos in (False, True):
            if framed == [bos] * adds_bos + bare + [eos] * adds_eos:
                return {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    raise ValueError(f"{vocabulary.source}: frames a text by other tokens than BOS and EOS, which GGUF cannot say")
