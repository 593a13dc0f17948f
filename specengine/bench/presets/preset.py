"""A preset: the contenders and settings of a published table."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.bench.race.contenders import CONTROL, PLAIN, Contender
from specengine.bench.race.rule_sweep import exact_contender

RANDOM = "random:"


@dataclass(frozen=True)
class Entry:
    """Names a contender of a preset.

    method: its name in the paper, empty without a published counterpart.
    never_slower: whether its tree adapts to its cost, so that its speedup should not fall below 1.
    """

    drafter: str
    method: str = ""
    rule: str = "match"
    never_slower: bool = False


@dataclass(frozen=True)
class Preset:
    """Holds the contenders and settings behind a published table.

    about: a title.  shipped: contenders for a model whose drafters come with the package.
    random: contenders for a model of random weights.  quality: whether to measure the quality of the text.
    """

    about: str
    shipped: tuple[Entry, ...]
    random: tuple[Entry, ...]
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    quality: bool = False

    def entries(self, model: str) -> tuple[Entry, ...]:
        """Returns the contenders for a model, without plain decoding and references."""
        return self.random if model.startswith(RANDOM) else self.shipped

    def contenders(self, model: str) -> list[Contender]:
        """Returns plain decoding, the entries, and their references.

        The exact rule is the reference of each entry of a preset with quality. The control is the reference of
        entries that should never be slower than plain decoding.
        """
        contenders = [PLAIN]
        if any(entry.never_slower for entry in self.entries(model)):
            contenders.append(Contender(CONTROL))
        for entry in self.entries(model):
            if self.quality:
                contenders.append(exact_contender(entry.drafter, entry.rule))
            contenders.append(Contender(entry.drafter, entry.rule))
        return list(dict.fromkeys(contenders))
