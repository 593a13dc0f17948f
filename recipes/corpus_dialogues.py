"""Makes training data of a corpus of suffix: python recipes/corpus_dialogues.py CORPUS FOLDER [PROMPTS.jsonl...]

A corpus holds the target's answers with the eight tokens before each, without their own repeats. Here each answer gets
the chat's beginning back, and the question of PROMPTS that ends alike and shares most rare words with it, where there
is one. Repeats are copied back from the answer itself, as long as the words around the seam are used to each other.
The tokens in question are the target's own distributions at every place, so a wrong seam costs no exactness.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch

from specengine.drafters.suffix.corpus_file import read_corpus
from specengine.tensor_parallel.loading import load_model, load_tokenizer
from specengine.train.data.dialogue_files import Dialogue, write_shard
from specengine.train.data.dialogues import DialogueConfig, question_prefix

_END = 65535
_CONTEXT = 8
_STRING = 8  # the corpus has no string of this length twice in a text
_LONGEST_GAP = 48
_SHARED = 0.35  # of the weight of a question's words: above it, the answer is believed to be the question's
_MODEL = "smollm2-135m"


def parts_of(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yields the parts of a corpus."""
    part: list[int] = []
    for token in tokens:
        if token == _END:
            yield part
            part = []
        else:
            part.append(token)


class Seams:
    """Fills the gaps between the parts of a text with copies of earlier strings."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._pairs = Counter(pairwise(tokens))
        self._triples = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))

    def joined(self, parts: Sequence[list[int]]) -> list[int]:
        """Joins the parts of one text."""
        text: list[int] = []
        for part in parts:
            if text:
                text += self._gap(text, part)
            text += part
        return text

    def _gap(self, text: list[int], part: list[int]) -> list[int]:
        """Returns the copy that fits best between a text and its next part, [] where none fits."""
        copy: list[int] = []
        best: list[int] = []
        score = self._fit(text[-2], text[-1], part[0])
        string = tuple(text[1 - _STRING :])
        begin = next(
            (i for i in range(len(text) - _STRING, -1, -1) if tuple(text[i : i + _STRING - 1]) == string), None
        )
        if begin is None:
            return best
        for token in text[begin + _STRING - 1 :][:_LONGEST_GAP]:
            copy.append(token)
            before = (text[-1:] + copy)[-2:]
            if (fit := self._fit(*before, part[0])) > score:
                score, best = fit, list(copy)
        return best

    def _fit(self, first: int, second: int, third: int) -> float:
        return 10 * self._triples[first, second, third] + self._pairs[second, third]


class Questions:
    """Finds the question of an answer among some prompts by its last tokens and the rare words of both."""

    def __init__(self, questions: Sequence[list[int]]) -> None:
        self._by_end: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        uses = Counter(token for question in questions for token in set(question))
        self._weight = {token: math.log(len(questions) / count) for token, count in uses.items()}
        for question in questions:
            self._by_end[tuple(question[-2:])].append(question)

    def of(self, end: Sequence[int], answer: Sequence[int]) -> list[int] | None:
        """Returns the tokens of the likeliest question that ends so, None where none is likely."""
        words = set(answer)
        alike = [(set(q), q) for q in self._by_end.get(tuple(end), ())]
        found = [(self._sum(own & words) / self._sum(own), q) for own, q in alike if self._sum(own)]
        share, question = max(found, default=(0.0, None), key=lambda each: each[0])
        return question if share > _SHARED else None

    def _sum(self, words: set[int]) -> float:
        return sum(self._weight[word] for word in words)


def tokens_of(corpus: Path) -> list[int]:
    """Reads the tokens of a corpus. Raises ValueError for another file and for larger ids."""
    try:
        tokens = read_corpus(corpus)["tokens"]
    except ValueError:
        tokens = torch.empty(0)
    if tokens.dtype != torch.uint16:
        raise ValueError(f"CORPUS: {corpus}: expected a corpus of suffix whose tokens are uint16")
    return tokens.int().tolist()


def questions_of(path: Path) -> Iterator[str]:
    """Yields the first turns of a file of prompts. Raises ValueError for a line that is no prompt."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(line)["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f'PROMPTS: {path}: line {number} is not {{"turns": [TEXT, ..]}}') from error


def main(corpus: Path, folder: Path, prompts: Sequence[Path]) -> None:
    """Writes shards. Raises ValueError for a corpus without answers, and for prompts that are not JSON lines."""
    tokenizer = load_tokenizer(_MODEL)
    assert tokenizer is not None
    tokens = tokens_of(corpus)
    seams = Seams(tokens)
    asked = {question for path in prompts for question in questions_of(path)}
    questions = Questions([tokenizer.encode(text, add_special_tokens=False) for text in sorted(asked)])
    prefix = question_prefix(tokenizer)
    mark = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    texts: list[list[list[int]]] = []
    for part in parts_of(tokens):
        if part[2:_CONTEXT] == mark:
            texts.append([])
        elif not texts:
            raise ValueError(f"CORPUS: {corpus} does not begin with the end of a question; expected a corpus of chats")
        texts[-1].append(part)
    if not texts:
        raise ValueError(f"CORPUS: {corpus} is empty")
    dialogues, known = [], 0
    for parts in texts:
        text = seams.joined(parts)
        question = questions.of(text[:2], text[_CONTEXT:])
        known += question is not None
        head = prefix + (text[:2] if question is None else question) + mark
        dialogues.append(Dialogue(head + text[_CONTEXT:], len(head)))
    random.Random(0).shuffle(dialogues)
    folder.mkdir(parents=True, exist_ok=True)
    config = DialogueConfig()  # of `specengine train` with seed 0, which then takes the folder as its own data
    about = {"model": load_model(_MODEL).name, "config": json.dumps(asdict(config)), "questions": "0"}
    for number, start in enumerate(range(0, len(dialogues), config.dialogues)):
        path = folder / f"dialogues-{number:05d}.safetensors"
        write_shard(path, dialogues[start : start + config.dialogues], about)
    count = sum(len(d.tokens) - d.answer for d in dialogues)
    print(f"{len(dialogues)} dialogues, {count} tokens of answers, {known} with their question")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes training data of a corpus of suffix.")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", type=Path, nargs="*")
    main(**vars(parser.parse_args()))
