"""Reads the texts of files and writes them as a corpus for the drafter `suffix`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from specengine.drafters.suffix.corpus_file import write_corpus
from specengine.tensor_parallel.loading import load_tokenizer
from specengine.tokenizer import Tokenizer
from specengine.train.data.dialogue_files import read_dialogues

_CONTEXT = 8  # tokens of a question that precede its answer in the corpus
_REPEAT = 8  # tokens: a token that ends a string of this length which the text already has is dropped


def make_corpus(model: str, files: Iterable[Path], out: Path, *, packed: bool = False) -> int:
    """Writes a corpus in a model's tokens and returns its number of tokens. packed: see write_corpus.

    Raises ValueError for a file that is no text and for a model without a tokenizer, OSError if writing fails.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ValueError("model: a model without a tokenizer cannot read texts")
    texts = (text for path in files for text in texts_of(path, tokenizer))
    return write_corpus(out, (part for text in texts for part in without_repeats(text)), tokenizer, packed=packed)


def without_repeats(text: list[int]) -> Iterator[list[int]]:
    """Yields the parts of a text without repeats: tokens that end a string of 8 which occurred before.

    A quarter of a small model's answers are repeats, and they add no draft.
    """
    seen: set[tuple[int, ...]] = set()
    part: list[int] = []
    for end in range(1, len(text) + 1):
        string = tuple(text[end - _REPEAT : end]) if end >= _REPEAT else None
        if string not in seen:
            part.append(text[end - 1])
        elif part:
            if len(part) >= _REPEAT:  # a short part between two repeats adds no draft
                yield part
            part = []
        if string:
            seen.add(string)
    if len(part) >= _REPEAT or len(part) == len(text):
        yield part


def texts_of(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields the token ids of each text in a file or folder.

    path: dialogues of `specengine train` (a shard or a folder of them), JSONL with `text` in every line, or plain text.
    Raises ValueError naming the file.
    """
    if path.is_dir():
        shards = sorted(path.glob("dialogues-*.safetensors"))
        if not shards:
            raise ValueError(f"files: {path} is a folder without dialogues of `specengine train`")
        for shard in shards:
            yield from texts_of(shard, tokenizer)
        return
    try:
        if path.suffix == ".safetensors":
            for dialogue in read_dialogues(path):
                yield dialogue.tokens[max(0, dialogue.answer - _CONTEXT) :]
            return
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"files: {path} cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        yield tokenizer.encode(text, add_special_tokens=False)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield tokenizer.encode(json.loads(line)["text"], add_special_tokens=False)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"files: {path}, line {number}: expected an object with `text`: {error}") from error
