"""What captured cycles of width 1 leave to a later draft, counted by the host, which does not wait for the device."""

from __future__ import annotations

from specengine._C import MAX_NODES

# Plain cycles between two catch-ups, at most. A pass of 32 rows mostly reads weights. A slot keeps 32 pairs, which
# take 1.5 MB for EAGLE-3 at a hidden size of 4096.
PLAIN_CYCLES = 32
MOST_ROWS = 1024  # of a catch-up of all slots, where a draft has no more: those of a prefill pass


class Backlog:
    """Counts the tokens that a slot's drafter has not read, at most.

    slots: of the batch.  most: tokens that a draft reads. No cycle with a draft leaves more.
    room: tokens that may wait, at most MAX_NODES.
    """

    def __init__(self, slots: int, most: int) -> None:
        plain = max(1, min(PLAIN_CYCLES, MOST_ROWS // slots - most))
        self.most, self.room = most, min(most + plain, MAX_NODES)
        self.waiting = 0

    def is_late(self, nodes: int) -> bool:
        """Counts the next cycle, of `nodes` nodes per tree; returns whether the drafter must catch up before it.

        A catch-up leaves one token unread. A cycle commits at most `nodes` tokens behind one that stays unread.
        """
        drafts = nodes > 1
        late = self.waiting > self.most if drafts else self.waiting >= self.room
        before = 1 if late else self.waiting
        self.waiting = min(nodes + 1, self.most) if drafts else before + 1
        return late
