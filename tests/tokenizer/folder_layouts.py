"""Folders whose files add tokens in many ways, and how they are compared with `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from specengine.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import BYTES, LETTERS, json_backend

SPACE = "▁"
_LETTERS = frozenset(LETTERS[byte] for byte in range(128, 256))
TEXTS = ("a b", " a  b", "the th", "", " ", "<s>a</s> b", "x\n\ny<s> <s>")


def _sentencepiece() -> tokenizers.Tokenizer:
    """<unk> 0, <s> 1, </s> 2, the bytes at 3 to 258, then a few pieces; spaces are not replaced."""
    pieces = [SPACE, *"abehlot", f"{SPACE}a", f"{SPACE}b", f"{SPACE}t", f"{SPACE}th", f"{SPACE}{SPACE}"]
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [(SPACE, "a"), (SPACE, "b"), (SPACE, "t"), (f"{SPACE}t", "h"), (SPACE, SPACE)]
    model = models.BPE({entry: at for at, entry in enumerate(entries)}, merges, unk_token="<unk>", byte_fallback=True)
    model.fuse_unk = True
    backend = tokenizers.Tokenizer(model)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in entries[:3]])
    return backend


def _llama() -> tokenizers.Tokenizer:
    backend = _sentencepiece()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return backend


def _metaspace() -> tokenizers.Tokenizer:
    backend = _sentencepiece()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    return backend


def _gemma() -> tokenizers.Tokenizer:
    backend = _sentencepiece()
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _composed() -> tokenizers.Tokenizer:
    backend = json_backend(False)
    backend.normalizer = normalizers.NFC()
    return backend


def _plain_marks() -> tokenizers.Tokenizer:
    """Byte-level; <s> and </s> are entries that are no added tokens, and <tool> is an added one that is not special."""
    vocab = {entry: at for at, entry in enumerate([*BYTES, "th", "the", "<s>", "</s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<tool>"])
    return backend


BACKENDS = {
    "byte level": lambda: json_backend(False),
    "composed": _composed,
    "plain marks": _plain_marks,
    "llama": _llama,
    "metaspace": _metaspace,
    "gemma": _gemma,
}
SIZES = {"byte level": 260, "composed": 260, "plain marks": 261, "llama": 272, "metaspace": 272, "gemma": 272}


@lru_cache(maxsize=len(BACKENDS))
def tokenizer_json(backend: str) -> str:
    """Returns the tokenizer.json of a backend by its name. The first id that it does not use is in SIZES."""
    return BACKENDS[backend]().to_str()


@lru_cache(maxsize=len(BACKENDS))
def vocabulary(backend: str) -> dict[str, int]:
    """Returns the entries of a backend by its name."""
    return BACKENDS[backend]().get_vocab()


def with_tokens(backend: str, *tokens: AddedToken | str) -> str:
    """Returns a tokenizer.json after `add_tokens`, which makes texts tokens that are matched in normalised text."""
    changed = tokenizers.Tokenizer.from_str(tokenizer_json(backend))
    changed.add_tokens([*tokens])
    return changed.to_str()


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Writes a folder.  files: contents by name. Other ones than text become JSON; a backend's name its file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name == "tokenizer.json" and content in BACKENDS:
            content = tokenizer_json(content)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return folder


def reference(folder: Path) -> Any:
    """Returns the tokenizer of `transformers`, of the class that the folder names."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return reference_class(config.get("tokenizer_class")).from_pretrained(str(folder), local_files_only=True)


def reference_class(name: str | None) -> Any:
    """Returns a class of `transformers`; the one without rules of its own for other names than two."""
    from transformers import logging

    logging.set_verbosity_error()
    if name == "GPT2Tokenizer":
        from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer as Kind
    elif name == "LlamaTokenizer":
        from transformers.models.llama.tokenization_llama import LlamaTokenizer as Kind
    else:
        from transformers.tokenization_utils_tokenizers import TokenizersBackend as Kind
    return Kind


def difference(ours: Tokenizer, theirs: Any, decode: Callable[[list[int], bool], str]) -> str | None:
    """Returns how two tokenizers differ in entries, ids or texts; None if they do not.

    decode: of the other; it takes whether special tokens are skipped.
    """
    if ours.entries() != (entries := {index: text for text, index in theirs.get_vocab().items()}):
        return f"entries {sorted(ours.entries().items() ^ entries.items())}"
    if (ours.bos_token_id, *ours.eos_token_ids) != (theirs.bos_token_id, *_known(theirs.eos_token_id)):
        return f"bos and eos {ours.bos_token_id}, {ours.eos_token_ids}"
    # The library takes an added token of Latin-1 letters for bytes; here it is decoded as its text.
    tokens = [
        token.content for token in theirs.added_tokens_decoder.values() if not _LETTERS.intersection(token.content)
    ]
    for text in _texts(tokens):
        ids = ours.encode(text, add_special_tokens=False)
        if ids != (expected := theirs.encode(text, add_special_tokens=False)):
            return f"{text!r} became {ids}, expected {expected}"
        for skip in (False, True):
            if (decoded := ours.decode(ids, skip)) != (expected := decode(ids, skip)):
                return f"{ids} became {decoded!r}, expected {expected!r}, skip_special_tokens={skip}"
            detokenizer = ours.detokenizer(skip)
            if (streamed := "".join(detokenizer.feed([index]) for index in ids) + detokenizer.finish()) != decoded:
                return f"{ids} streamed became {streamed!r}, at once {decoded!r}, skip_special_tokens={skip}"
    return None


def decode_saved(theirs: Any, folder: Path) -> Callable[[list[int], bool], str]:
    """Returns how the tokenizer decodes once it was saved, without tokens that were special at any time.

    Before that the library (0.23) decodes a token whose `normalized` was changed as it did first, and shows a special
    token that is matched in normalised text.
    """
    saved = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    listed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    special = {token["id"] for token in listed if token["special"]}
    special |= {index for index, token in theirs.added_tokens_decoder.items() if token.special}

    def decode(ids: list[int], skip: bool) -> str:
        return saved.decode([index for index in ids if not (skip and index in special)], skip_special_tokens=False)

    return decode


def _known(index: int | None) -> list[int]:
    return [] if index is None else [index]


def _texts(tokens: list[str]) -> Iterator[str]:
    yield from TEXTS
    for token in tokens:
        yield from (token, f"a{token}b", f"a {token} b", f"  {token}{token} th<s>{token}")
    yield " ".join(tokens) + "".join(tokens)
