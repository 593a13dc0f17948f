"""`specengine corpus`: texts of files, as a corpus that drafts are copied from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from specengine.drafters.suffix.corpus_file import write_corpus
from specengine.tensor_parallel.loading import load_tokenizer
from specengine.tokenizer import Tokenizer
from specengine.train.data.dialogue_files import read_dialogues

_BEFORE = 8  # tokens of a question before its answer: how a turn begins
_REPEATED = 8  # tokens: what a text says again after so many it already has, nobody has to find twice


def make_corpus(model: str, files: Iterable[Path], out: Path) -> int:
    """Writes a corpus for a model's tokens; returns how many it has. Raises ValueError, OSError."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ValueError("model: a model without tokenizer cannot read texts")
    texts = (text for path in files for text in texts_of(path, tokenizer))
    return write_corpus(out, (part for text in texts for part in without_repeats(text)), tokenizer)


def without_repeats(text: list[int]) -> Iterator[list[int]]:
    """The parts of a text without the tokens that end a string of 8 it said before: a quarter of a small model's
    answers, which bring no draft that the rest does not."""
    seen: set[tuple[int, ...]] = set()
    part: list[int] = []
    for end in range(1, len(text) + 1):
        string = tuple(text[end - _REPEATED : end]) if end >= _REPEATED else None
        if string not in seen:
            part.append(text[end - 1])
        elif part:
            if len(part) >= _REPEATED:  # what is left between two repeats says little
                yield part
            part = []
        if string:
            seen.add(string)
    if len(part) >= _REPEATED or len(part) == len(text):
        yield part


def texts_of(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Texts of a file: answers of dialogues that `specengine train` made (or of a folder of them), JSONL with `text` in
    every line, or else a text as it is. Raises ValueError naming the file."""
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
                yield dialogue.tokens[max(0, dialogue.answer - _BEFORE) :]
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
