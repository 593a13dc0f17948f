"""The dialogues of a training run: the held-out ones, the order of the others, and batches of them."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from specengine.train.data.dialogue_files import Dialogue, read_dialogues
from specengine.train.data.target_states import TargetStates
from specengine.train.objectives.training_batch import TrainingBatch

_SHORTEST_ANSWER = 8  # tokens; shorter answers are not worth a pass


@dataclass(frozen=True)
class NumberedDialogue:
    """A dialogue and its number in all shards, which is the key of its states."""

    number: int
    dialogue: Dialogue

    @property
    def size(self) -> int:
        """Its tokens."""
        return len(self.dialogue.tokens)


class Corpus:
    """The dialogues of some shards.

    held_out: number of dialogues that are never trained on; the seed alone decides which, and the order of the others.
    everything: questions are learned too, else only answers.  longest: tokens kept of a dialogue.
    Raises ValueError for shards with too few dialogues.
    """

    def __init__(
        self, shards: Sequence[Path], held_out: int, seed: int, *, longest: int = 2048, everything: bool = False
    ) -> None:
        self._seed = seed
        self._everything = everything
        found = [d for path in shards for d in read_dialogues(path)]
        numbered = [
            NumberedDialogue(i, Dialogue(d.tokens[:longest], d.answer))
            for i, d in enumerate(found)
            if min(len(d.tokens), longest) >= d.answer + _SHORTEST_ANSWER
        ]
        if len(numbered) < held_out + 1:
            raise ValueError(f"data: {len(numbered)} usable dialogues, expected more than the {held_out} held out")
        random.Random(seed).shuffle(numbered)
        self.held_out = numbered[:held_out]
        self.training = numbered[held_out:]

    def epoch(self, number: int) -> list[NumberedDialogue]:
        """Returns the training dialogues in the order of one epoch."""
        order = list(self.training)
        random.Random(f"{self._seed} {number}").shuffle(order)
        return order

    @property
    def fingerprint(self) -> str:
        """Identifies all dialogues, trained on and held out, in their order."""
        text = repr([(d.number, d.dialogue) for d in (*self.held_out, *self.training)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def longest(self) -> int:
        """Tokens of the longest training dialogue."""
        return max(d.size for d in self.training)

    def wanted_tokens(self, dialogues: Sequence[NumberedDialogue]) -> int:
        """Counts the tokens to learn in some dialogues."""
        return sum(d.size - self._first(d.dialogue) - 1 for d in dialogues)

    def frequent_tokens(self, count: int) -> torch.Tensor:
        """Returns the most frequent token ids of the training text, int64, ascending (ties: the lower id)."""
        counts = Counter(t for d in self.training for t in d.dialogue.tokens[self._first(d.dialogue) + 1 :])
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        return torch.tensor(sorted(ranked[:count]), dtype=torch.int64)

    def _first(self, dialogue: Dialogue) -> int:
        """Finds the first row whose next token is learned."""
        return 0 if self._everything else max(0, dialogue.answer - 1)

    def batch(
        self,
        dialogues: Sequence[NumberedDialogue],
        states: Callable[[int, Dialogue], TargetStates],
        device: torch.device,
    ) -> TrainingBatch:
        """Makes one batch of some dialogues, floats as float32. states: the target's, by number and dialogue."""
        made = [states(d.number, d.dialogue) for d in dialogues]
        lengths = torch.tensor([d.size for d in dialogues])
        row = torch.arange(int(lengths.max()))
        first = torch.tensor([self._first(d.dialogue) for d in dialogues])[:, None]
        wanted = (row >= first) & (row < lengths[:, None] - 1)

        def rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            padded = pad_sequence(list(tensors), batch_first=True).to(device)
            return padded.float() if padded.is_floating_point() else padded.long()

        def heads(tensors: Sequence[torch.Tensor]) -> torch.Tensor:  # [layers, K, T, D] -> [layers, B, K, T, D]
            return rows([x.permute(2, 0, 1, 3) for x in tensors]).permute(2, 0, 3, 1, 4).contiguous()

        at_layers = [s.at_layers for s in made if s.at_layers is not None]
        keys = [s.keys for s in made if s.keys is not None]
        values = [s.values for s in made if s.values is not None]

        return TrainingBatch(
            tokens=rows([torch.tensor(d.dialogue.tokens) for d in dialogues]),
            lengths=lengths.to(device),
            wanted=wanted.to(device),
            greedy=rows([s.greedy for s in made]),
            last=rows([s.last for s in made]),
            at_layers=rows(at_layers) if at_layers else None,
            keys=heads(keys) if keys else None,
            values=heads(values) if values else None,
        )


def steps_of(corpus: Corpus, epoch: int, tokens: int) -> Iterator[list[NumberedDialogue]]:
    """Groups the epoch's dialogues by at least `tokens` tokens to learn; the last group may have fewer."""
    group: list[NumberedDialogue] = []
    found = 0
    for dialogue in corpus.epoch(epoch):
        group.append(dialogue)
        found += corpus.wanted_tokens([dialogue])
        if found >= tokens:
            yield group
            group = []
            found = 0
    if group:
        yield group


def split(group: Sequence[NumberedDialogue], rows: int) -> list[list[NumberedDialogue]]:
    """Splits a group into parts of similar length, of at most `rows` padded rows each or of one dialogue."""
    parts: list[list[NumberedDialogue]] = []
    for dialogue in sorted(group, key=lambda d: (d.size, d.number)):
        if parts and (len(parts[-1]) + 1) * dialogue.size <= rows:
            parts[-1].append(dialogue)
        else:
            parts.append([dialogue])
    return parts
