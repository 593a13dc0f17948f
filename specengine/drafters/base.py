"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.rules.base import Wants

if TYPE_CHECKING:
    from specengine.cache.kv_cache import KVCache
    from specengine.draft_trees.scored_tree import ScoredTree
    from specengine.engine.device.graph_batch import GraphBatch
    from specengine.engine.request import Request
    from specengine.models.hidden_states import HiddenStates
    from specengine.models.transformer import Transformer
    from specengine.ops.weight import Projection
    from specengine.tokenizer import Tokenizer


class Drafter(ABC):
    """Proposes a tree per request and cycle. Node 0 is the root, the last committed token.

    What it remembers of a request lives in `request.drafter_state`, so that one drafter serves any batch.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[Any]]  # dataclass of the options
    takes_path: ClassVar[bool] = False
    drafts_on_device: ClassVar[bool] = False  # whether draft_on_device can be part of a captured cycle
    proposes: ClassVar[bool] = False  # whether its nodes have chances, by which trees can be merged
    reads_hidden_states: bool = False  # whether it is given the target's hidden states
    reads_choices: ClassVar[bool] = False  # whether it is told the target's likeliest tokens behind its nodes
    _attached = False  # see _attach_once
    hidden_state_layers: tuple[int, ...] = ()  # layers of the target whose input is a hidden state too, rising
    # What it can serve: any tree will do for NOTHING, and is a deterministic one without a distribution for SAMPLES.
    offers: ClassVar[frozenset[Wants]] = frozenset({Wants.NOTHING, Wants.SAMPLES})

    config: Any  # an instance of config_type

    def __init__(self, config: Any, path: str | None, target: Transformer) -> None:
        self.config = config

    @property
    def projections(self) -> Sequence[Projection]:
        """Its linear layers that captured cycles run: how to multiply by them is measured before."""
        return ()

    @property
    def adaptive(self) -> bool:
        """Whether the tree's size may follow what pays; else it is always the largest."""
        return True

    @property
    def drafts_chains(self) -> bool:
        """Whether no node of its trees ever has two children."""
        return False

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Largest tree it ever proposes, root included."""

    @property
    def spare_slots(self) -> int:
        """GraphBatch of the cache that a request needs behind its longest text."""
        return self.max_nodes

    @abstractmethod
    def draft(self, requests: Sequence[Request]) -> list[DraftTree]:
        """One tree per request, no deeper than the request's `draft_limit`."""

    def propose(self, requests: Sequence[Request]) -> list[ScoredTree]:
        """The largest tree per request, with the chance of each node that turned out true so far."""
        raise NotImplementedError(f"{self.name} gives its nodes no chances")

    def rest(self, requests: Sequence[Request]) -> None:
        """Told instead of draft() or propose() that nothing is asked of it in this cycle."""
        return None

    def credit(self, requests: Sequence[Request], saved: float) -> None:
        """Told what drafting for them has just saved, in seconds of them all; less than 0 is a loss."""
        return None

    def draft_with_logits(
        self, requests: Sequence[Request], sampled: bool
    ) -> tuple[list[DraftTree], DraftLogits | None]:
        """As draft(), with the distributions the children come from, on the target's device; None: there are none.

        sampled: children are drawn from them, else chosen in any way. Called where the rule wants to know.
        """
        return self.draft(requests), None

    def draft_for(self, wants: Wants, requests: Sequence[Request]) -> tuple[list[DraftTree], DraftLogits | None]:
        """The trees of a cycle, and what the rule wants to know of them."""
        if wants is Wants.NOTHING:
            return self.draft(requests), None
        return self.draft_with_logits(requests, sampled=wants is not Wants.PROBABILITIES)

    def room_for_logits(self, nodes: int) -> DraftLogits | None:
        """Buffers for what draft_with_logits returns of trees of `nodes` nodes in all; None: it never returns any.

        A captured cycle reads them, so what is not a tensor in them must hold for every draft.
        """
        return None

    def new_device_state(self, slots: int) -> Any:
        """What it keeps between two captured cycles of at most so many requests, for GraphBatch.drafter_state."""
        return None

    def load(self, state: Any, requests: Sequence[Request]) -> None:
        """Takes requests into the first slots of a device state; the others are idle."""
        return None

    def unload(self, state: Any, requests: Sequence[Request]) -> None:
        """Takes what a device state has of its requests back to the host: others want the slots."""
        return None

    def observe_on_device(self, slots: GraphBatch, hidden_states: HiddenStates) -> None:
        """observe() of a captured cycle.  hidden_states: of all rows of its pass."""
        return None

    def draft_on_device(self, slots: GraphBatch) -> TreeBatch:
        """One tree of slots.nodes rows per slot from device tensors alone: nothing of it may come from the host.

        A drafter without this drafts on the host between two cycles, which costs a cycle's overlap.
        """
        raise NotImplementedError(f"{self.name} drafts on the host")

    def attach(self, cache: KVCache) -> None:
        """Shows it the target's cache, before anything is drafted; what it keeps beside it is allocated here.

        A fixed cache never moves, as captured graphs need it; nothing of the drafter's must then.
        """
        return None

    def _attach_once(self) -> None:
        """For drafters whose memory goes with one cache. Raises ValueError where an engine has it already."""
        if self._attached:
            raise ValueError(f"drafter: {self.name} belongs to another engine; make one for each engine")
        self._attached = True

    def skips_reading(self, batch: int) -> bool:
        """Whether a text that begins in a batch of so many requests is to be `unread`: what is kept beside the
        target's cache is not kept of it, and it has no drafts that need that. Asked once for each
        that shares no pages."""
        return False

    def observe_prompt(self, request: Request, start: int, hidden_states: HiddenStates) -> None:
        """Told the hidden states of a prompt's tokens from position `start` on, chunk by chunk.

        The last token is not among them: it is the first root, so every token that follows one of these is known.
        The first chunk begins behind the pages that are shared with earlier requests; see filled().
        """
        return None

    def filled(self, request: Request) -> int:
        """How many of a request's first slots hold all that it keeps beside the target's cache, as it stays.

        No further are pages shared with other requests, whose first slots then are filled, too. May be called at any
        moment, in any thread.
        """
        return len(request.tokens)

    def observe(
        self, requests: Sequence[Request], committed: Sequence[list[int]], hidden_states: HiddenStates | None
    ) -> None:
        """Told after every cycle what was committed (accepted tokens, then the bonus), before the next draft.

        hidden_states: where it reads them, of the committed path's nodes (root first), one request after the other; each
        node is followed by the committed token of the same number. Else None.
        """
        return None

    def observe_choices(
        self, requests: Sequence[Request], committed: Sequence[list[int]], choices: Sequence[Sequence[int]]
    ) -> None:
        """Told, where it reads choices, before observe(): the likeliest token behind every node of the last trees (and
        perhaps more), by the target's unprocessed logits, and what was committed."""
        return None

    def release(self, request: Request) -> None:
        """The request is over: gives back what it holds. May be called at any moment, in any thread."""
        return None

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Raises ValueError where the drafter's tokens are not those of the target's tokenizer."""
        return None

    @property
    def page_bytes(self) -> int:
        """Device memory it needs beside each page of the target's cache."""
        return 0
