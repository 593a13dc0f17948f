"""When something costly is left out: for more and more cycles where it did not pay of late."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import ceil

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.tree_choice import cycle_seconds

SHARE = 100  # what loses takes a hundredth of the time, where pauses may be as long as that asks for
SHORT, LONGEST = 15, 255  # cycles: a small loss is tried again soon, and none is never tried again
MEMORY = 16  # uses: what one saves differs so much from the next that fewer would pause what pays
TRIED = 8  # uses before the first pause: the first ones are slow, and nothing is known of what drafts are worth
TEXTS, FIRST = 32, 12  # texts of late, and how many must have ended before any is left unread
FEWEST, ROUNDS = 4, 16  # one in so many batches is read all the same, one in as many as a batch has texts between


@dataclass
class _Pause:
    """saved: of a plain cycle, by a use, of late.  cycles: of the last pause, and left of it."""

    saved: float = 0.0
    uses: int = 0
    cycles: int = 0
    left: int = 0


class Pauses:
    """Told what each use saved, says when to do without. Every size of batch, by powers of two, has its own: rows that
    are nearly free for one request are not for many.

    bearable: loss of one request's plain cycle that is no reason to do without.
    """

    def __init__(self, bearable: float = 0.0) -> None:
        self._bearable, self._sizes = bearable, defaultdict[int, _Pause](_Pause)

    def here(self, requests: int) -> bool:
        """Whether to do without in this cycle; to be asked once a cycle."""
        pause = self._sizes[requests.bit_length()]
        pause.left -= 1
        return pause.left >= 0

    def weigh(self, requests: int, saved: float, plain: float) -> None:
        """saved: seconds of a cycle, against one without, which takes `plain`; less than 0 is a loss."""
        pause = self._sizes[requests.bit_length()]
        pause.uses = min(pause.uses + 1, MEMORY)
        pause.saved += (saved / plain - pause.saved) / pause.uses
        most = min(LONGEST, max(SHORT, ceil(-SHARE * pause.saved)))
        loses = pause.uses >= TRIED and pause.saved < -self._bearable / requests
        pause.cycles = min(most, 2 * pause.cycles + 1) if loses else 0
        pause.left = 0 if saved > 0 else pause.cycles  # what gains once gains again soon: texts have such passages


@dataclass
class _Worth:
    """gained: seconds by the drafts of a text, less what it took to read it, of late.  ended: texts that were read, of
    which the first counts only until there is a second one: first passes are slow.
    texts: that began since that was found to be a loss."""

    gained: float = 0.0
    ended: int = 0
    texts: int = 0


class Newcomers:
    """Told what reading texts for drafts gained, says which are not worth being read from their beginning on.

    Reading a prompt costs what a share of the target's layers does, drafted or not. Where drafts do not bring that in,
    by sizes of batch as for Pauses, whole batches are left unread, and now and then one is read, so that trials judge
    what they would be of all.
    """

    def __init__(self) -> None:
        self._sizes = defaultdict[int, _Worth](_Worth)

    def ended(self, requests: int, gained: float) -> None:
        """Notes a text that was read. requests: of its largest batch.  gained: seconds; less than 0 is a loss."""
        worth = self._sizes[requests.bit_length()]
        worth.gained += (gained - worth.gained) / min(max(1, worth.ended), TEXTS)
        worth.ended += 1

    def unread(self, requests: int) -> bool:
        """Whether to leave out a text that begins in a batch of so many; to be asked once for each."""
        worth = self._sizes[requests.bit_length()]
        if worth.ended < FIRST or worth.gained >= 0:
            worth.texts = 0
            return False
        batch, rounds = worth.texts // requests, min(max(FEWEST, requests), ROUNDS)
        worth.texts += 1
        return batch % rounds < rounds - 1


class Trial:
    """Leaves a drafter's cycles out, for so long that what they lose stays a fiftieth of the time.

    costs: of the target's passes.
    """

    _SHARE, _UNSURE, _MEMORY = 50, 20, 8

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._saved, self._uses = 0.0, 0  # of a plain cycle, by a drafted one, of late
        self._read = 0.0  # plain cycles' time that prompts took, since the last draft that was judged
        self._left = 0
        self._open: tuple[int, float, float] | None = None

    def here(self) -> bool:
        """Whether to do without in this cycle; to be asked once a cycle."""
        self._left -= 1
        return self._left >= 0

    def read(self, requests: int, prefix: float, seconds: float) -> None:
        """Notes a draft that read prompts: that is lost where drafts do not pay, but says nothing of the next one."""
        self._read += seconds / cycle_seconds(self._costs, requests, 0, prefix)

    def drafted(self, requests: int, nodes: int, prefix: float, seconds: float) -> None:
        """Notes a draft. nodes: of all requests, beside the roots.  seconds: that it took."""
        plain = cycle_seconds(self._costs, requests, 0, prefix)
        self._open = requests, plain, cycle_seconds(self._costs, requests, nodes, prefix) + seconds

    def committed(self, tokens: int) -> None:
        """Notes what became of it: tokens of all requests."""
        draft, self._open = self._open, None  # at once: engines in other threads may share the drafter
        if draft is None:
            return
        requests, plain, taken = draft
        saved = tokens / requests - taken / plain
        self._uses = min(self._uses + 1, self._MEMORY)
        self._saved += (saved - self._saved) / self._uses
        sure = self._uses / self._MEMORY  # one unlucky draft says little, all the less behind a long prompt
        share = self._UNSURE + sure * (self._SHARE - self._UNSURE)
        lost = sure**2 * self._read - self._saved
        self._left = ceil(share * lost) if self._saved < 0 and saved <= 0 else 0  # a gain is tried again at once
        self._read = 0.0
