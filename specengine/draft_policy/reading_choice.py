"""Whether a new request is read for drafts at all.

Reading a prompt for a drafter costs about as much as some of the target's layers, drafted or not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

REQUESTS, FIRST = 32, 12  # recent requests, and how many must have ended before any is skipped
FEWEST, MOST = 4, 16  # one batch in n is still read, n = min(max(FEWEST, batch size), MOST)


@dataclass
class _Worth:
    """gained: mean seconds that drafts of a recent request saved, less the seconds of its reading.
    ended: requests that were read. The first one counts only until the second has ended: first passes are slow.
    begun: requests that began since reading was found to be a loss."""

    gained: float = 0.0
    ended: int = 0
    begun: int = 0


class ReadingChoice:
    """Decides, by what reading earlier requests gained, which new requests are not read for drafts.

    Batch sizes are told apart by powers of two. Where reading loses, whole batches are skipped. Now and then one batch
    is read, so that trials measure the gain of a batch in which all requests are read.
    """

    def __init__(self) -> None:
        self._sizes = defaultdict[int, _Worth](_Worth)

    def record_gain(self, requests: int, gained: float) -> None:
        """Records a request that was read and has ended.

        requests: of the largest batch it was in.  gained: seconds, negative for a loss.
        """
        worth = self._sizes[requests.bit_length()]
        worth.gained += (gained - worth.gained) / min(max(1, worth.ended), REQUESTS)
        worth.ended += 1

    def should_skip(self, requests: int) -> bool:
        """Returns whether to skip a request that begins in a batch of this size; to be called once for each."""
        worth = self._sizes[requests.bit_length()]
        if worth.ended < FIRST or worth.gained >= 0:
            worth.begun = 0
            return False
        batch = worth.begun // requests
        rounds = min(max(FEWEST, requests), MOST)
        worth.begun += 1
        return batch % rounds < rounds - 1
