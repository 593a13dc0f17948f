"""Machines that run mixtures of experts, and texts of which a drafter guesses a given share: no clocks, no models."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.expert_reads import ExpertReads
from specengine.draft_trees.scored_tree import ScoredTree
from tests.draft_policy.replay import Machine, Plan, Text

DEEPEST = 8  # levels that the drafter guesses
DRAFTS = {"eagle3": (0.1e-3, 0.04e-3)}  # seconds of the first and of each further level
SECONDS = 1e-12  # of a byte
OVERHEAD = 0.05  # of the bytes of one row: what a pass takes beside reading
PLANS = [Plan(), *(Plan("eagle3", levels, 1, deepest=DEEPEST) for levels in range(1, DEEPEST + 1))]


@dataclass(frozen=True)
class Mixture:
    """A target. dense, routed: bytes that one row reads beside experts, and of experts.

    exponent: of the experts that its passes read, which the policy does not know.
    """

    experts: int
    per_token: int
    dense: float
    routed: float
    exponent: float

    @property
    def machine(self) -> Machine:
        """The machine whose passes wait for memory alone."""
        return Machine({rows: self._seconds(rows) for rows in range(1, 65)}, DRAFTS, experts=self.reads)

    @property
    def costs(self) -> CycleCosts:
        """What a policy of this target begins with."""
        share = self.routed / (self.dense + self.routed)
        return CycleCosts(experts=ExpertReads(self.experts, self.per_token, share))

    def reads(self, rows: int) -> float:
        """Returns how many experts a layer reads."""
        return min(self.experts, self.per_token * rows**self.exponent)

    def _seconds(self, rows: int) -> float:
        overhead = OVERHEAD * (self.dense + self.routed)
        return SECONDS * (overhead + self.dense + self.routed * self.reads(rows) / self.per_token)


MIXTURES = {
    "qwen3-30b-a3b": Mixture(128, 8, 1.23e9, 1.81e9, 0.7),
    "qwen3.6-35b-a3b": Mixture(256, 8, 1.94e9, 1.01e9, 0.8),
    "gpt-oss-20b": Mixture(32, 4, 0.9e9, 2.7e9, 0.77),
    "mixtral-8x7b": Mixture(8, 2, 3.3e9, 22.5e9, 0.77),  # seven rows read all experts: all levels pay, or none
    "siblings": Mixture(128, 8, 1.23e9, 1.81e9, 0.9),  # rows that share few experts
}
SIBLINGS = MIXTURES["siblings"]


def text_of(right: float, tokens: int = 1500, seed: int = 0) -> Text:
    """Returns a text. right: the share of its tokens that the drafter guesses, wherever its chain begins."""
    draw = Random(seed)
    text = [draw.randrange(1000) for _ in range(tokens)]
    guesses = [token if draw.random() < right else -1 for token in text]
    drafts = []
    for place in range(tokens):
        chain = guesses[place : place + DEEPEST]
        tree = ScoredTree([0, *chain], [-1, *range(len(chain))], [1.0, *[right] * len(chain)])
        drafts.append({"eagle3": tree})
    return Text(text, drafts)
