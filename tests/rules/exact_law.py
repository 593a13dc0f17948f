"""The law of a rule's output, summed in double precision over all drafted trees and all outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

import numpy as np

from specengine.rules import Rule, parse_rule
from tests.rules.drafting import Conditional, Drafted, Models


def joint(conditional: Conditional, vocab: int, length: int) -> np.ndarray:
    """Probabilities [V, ..., V] of the first `length` tokens."""
    return extended(np.ones(()), conditional, vocab, length)


def extended(mass: np.ndarray, conditional: Conditional, vocab: int, length: int) -> np.ndarray:
    """Mass of prefixes, [V] * n, continued by the conditional distributions to [V] * length."""
    while mass.ndim < length:
        mass = np.stack([m * conditional(path) for path, m in np.ndenumerate(mass)]).reshape(*mass.shape, vocab)
    return mass


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).sum() / 2)


class Enumerated:
    """The output of a rule on the drafted trees, which must be all possible trees.

    draft: the distributions handed to the rule; None: it is told of none.  masks: the tokens allowed behind every
    path; the rule then gets them together with target, draft and trees as they are without masks.
    """

    def __init__(
        self,
        core: ModuleType,
        spec: str | Rule,
        models: Models,
        trees: Iterable[Drafted],
        *,
        draft: Conditional | None = None,
        replacement: bool = False,
        residual_kept: bool = False,
        masks: Callable[[tuple[int, ...]], np.ndarray] | None = None,
    ) -> None:
        rule = parse_rule(spec)
        self.vocab = models.vocab
        self.accepted = 0.0  # tokens of the tree, in expectation
        self._mass: dict[int, np.ndarray] = {}
        for tree in trees:
            inner = tree.inner
            outcomes = core.rule_law(
                *(rule.kernel, rule.options, tree.parents, tree.tokens),
                [models.target(path) for path in tree.paths],
                [draft(path) if draft and node in inner else [] for node, path in enumerate(tree.paths)],
                replacement=replacement,
                residual_kept=residual_kept,
                masks=[masks(path) for path in tree.paths] if masks else [],
            )
            for node, bonus, probability in outcomes:
                emitted = (*tree.paths[node], bonus)
                self.accepted += tree.probability * probability * (len(emitted) - 1)
                mass = self._mass.setdefault(len(emitted), np.zeros((self.vocab,) * len(emitted)))
                mass[emitted] += tree.probability * probability

    def law(self, reference: Conditional, length: int) -> np.ndarray:
        """Probabilities [V, ..., V] of the first `length` tokens; tokens not emitted yet follow `reference`."""
        total = np.zeros((self.vocab,))
        for n in range(1, length + 1):
            total = extended(total, reference, self.vocab, n)
            total = total + self._mass.get(n, 0)
        return total
