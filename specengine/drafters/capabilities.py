"""What only some drafters do. A drafter derives from Drafter and from each capability that it has.

The engine asks isinstance(drafter, Capability).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.drafters.base import Drafter
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.ops.weight import Projection
from specengine.rules.base import Wants
from specengine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specengine.models.hidden_states import HiddenStates


class DeviceDrafter(ABC):
    """Drafts inside captured cycles, unless the rule reads distributions; see drafts_in_cycles.

    All others draft on the host between two cycles, which costs their overlap.

    drafts_in_cycle: false where its options ask for trees that only the host grows.

    observe() is not called in captured cycles; a DeviceStateDrafter has observe_on_device() instead.
    """

    drafts_in_cycle: bool = True

    @abstractmethod
    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        """Returns one tree of batch.nodes rows per slot, from device tensors alone: a graph reads no host memory.

        The tree has at most batch.nodes - 1 levels, so deeper levels are not drafted; of one node it is the root.
        """


class DeviceStateDrafter(DeviceDrafter):
    """Keeps state on the device between two captured cycles."""

    @property
    @abstractmethod
    def device_rows(self) -> int:
        """The rows of its largest pass, for one request; the memory plan counts them."""

    @abstractmethod
    def new_device_state(self, slots: int) -> Any:
        """Returns the state of at most `slots` requests, for DraftBatch.drafter_state."""

    @abstractmethod
    def load(self, state: Any, slot: int, request: DraftRequest) -> None:
        """Moves a request into an idle slot of a device state; all slots are idle at first."""

    @abstractmethod
    def unload(self, state: Any, slot: int, request: DraftRequest | None) -> None:
        """Makes a slot idle, and moves its request back to the host; None: the request was released."""

    def before_cycle(self, batch: DraftBatch) -> None:
        """Prepares the device state for a cycle of batch.nodes nodes; called by the host before each, in no graph.

        A cycle of width 1 drafts nothing and may leave work for later. Here the work is done where a draft needs it,
        or where too much waits. The host must not wait for the device. By default nothing is done.
        """

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:
        """Observes a captured cycle, in place of observe(). hidden_states: of all rows of its pass.

        By default nothing is kept: the next draft finds the committed tokens in the batch's history.
        """


class NetworkDrafter(ABC):
    """Runs linear layers of its own, whose kernels the engine tunes before the first cycle on a GPU."""

    @property
    @abstractmethod
    def projections(self) -> Sequence[Projection]:
        """Its linear layers."""


class PromptObserver(ABC):
    """Observes prompts while the target reads them."""

    @abstractmethod
    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        """Observes the prompt's tokens from position `start` on, chunk by chunk.

        hidden_states: of the chunk. The prompt's last token is the first root and in no chunk, so the token behind each
        chunk's last one is known. The first chunk begins behind the pages that are shared with earlier requests; see
        CacheCompanion.filled.
        """


class HiddenStateReader(PromptObserver):
    """Reads the target's hidden states of prompts and of committed paths.

    hidden_state_layers: rising; layers of the target whose input it reads, beside the last hidden state.
    reads_hidden_states: false only for a combination of which no part reads them.
    """

    hidden_state_layers: tuple[int, ...] = ()
    reads_hidden_states: bool = True


class CacheCompanion(ABC):
    """Keeps keys and values of its own beside the target's cache."""

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Device memory that it needs beside each page of the target's cache."""

    @abstractmethod
    def attach(self, cache: KVCache) -> None:
        """Allocates its memory beside the target's cache, before the first draft.

        A fixed cache never moves, because captured graphs hold on to it; the drafter's memory must not move either.
        Raises ValueError for a second engine's cache, where the memory goes with one cache.
        """

    def filled(self, request: DraftRequest) -> int:
        """Returns how many of a request's first slots hold their final keys and values.

        Pages of a request that it reads are shared with others no further than this. Any thread may call it at any
        moment.
        """
        return len(request.tokens)

    def reads(self, tokens: int, answer: int, batch: int) -> bool:
        """Returns whether to read a new request; asked once for each.

        tokens: of its prompt.  answer: tokens of its answer, at most.  batch: size of its batch.

        The answer is the request's `drafter_reads`. Of a request that it does not read it keeps nothing beside the
        target's cache, and drafts nothing that needs this.
        """
        return True


class LogitsDrafter(ABC):
    """Gives the distributions that its nodes come from, to rules that want them."""

    def gives_logits(self, wants: Wants) -> bool:
        """Returns whether draft_with_logits() drafts for such a rule; otherwise draft() does."""
        return wants is not Wants.NOTHING

    @abstractmethod
    def draft_with_logits(self, requests: Sequence[DraftRequest], sampled: bool) -> Draft:
        """Drafts as draft() does, with the children's distributions on the target's device, where there are any.

        sampled: children are drawn from the distributions; otherwise they may be chosen in any way.
        """

    @abstractmethod
    def room_for_logits(self, nodes: int) -> DraftLogits | None:
        """Returns buffers for the distributions of `nodes` nodes in all; None: draft_with_logits never returns any.

        A captured cycle reads the buffers, so whatever in them is no tensor must hold for every draft.
        """


class ScoredDrafter(ABC):
    """Gives its nodes chances, by which `combine` merges its trees with those of other drafters."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        """Returns a tree per request, with the learned chance of each node.

        min_gain: what one more level must be expected to add, the sum over the requests; 0: draft all levels.
        """

    def ready(self, requests: Sequence[DraftRequest]) -> int:
        """Returns for how many of these requests it can draft; by default for all."""
        return len(requests)

    def drafted_levels(self, trees: Sequence[ScoredTree]) -> int:
        """Returns how many levels the last propose() drafted, which took its time; `trees` is what it returned.

        By default the deepest tree's levels: a drafter that leaves out its deepest nodes counts them here.
        """
        return max((tree.levels for tree in trees), default=0)

    @abstractmethod
    def skip(self, requests: Sequence[DraftRequest]) -> None:
        """Notes, in place of propose(), that this cycle drafts nothing for these requests."""

    @property
    def learned(self) -> list[list[float]]:
        """Lists of fixed length with all that it has learned of chances. The next process fills them again."""
        return []


class ChoiceReader(ABC):
    """Reads the target's likeliest token behind each node, whatever the rule accepts."""

    @abstractmethod
    def observe_choices(self, draft: Draft, committed: Sequence[list[int]], choices: Sequence[Sequence[int]]) -> None:
        """Observes a cycle; called before observe(). It may be left out where all trees are roots alone.

        choices: of each request, the likeliest token behind every node of its tree, by the target's unprocessed
        logits. There may be more choices than nodes.
        """


class TokenizerChecker(ABC):
    """Has files or a model with token ids, which must be those of the target's tokenizer."""

    @abstractmethod
    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Raises ValueError where its token ids are another tokenizer's."""


def gives_logits(drafter: object, wants: Wants) -> TypeGuard[LogitsDrafter]:
    """Returns whether a drafter drafts for such a rule by draft_with_logits()."""
    return isinstance(drafter, LogitsDrafter) and drafter.gives_logits(wants)


def drafts_in_cycles(drafter: object, wants: Wants) -> TypeGuard[DeviceDrafter]:
    """Returns whether captured cycles draft for such a rule; their trees have no distributions for it to read."""
    return isinstance(drafter, DeviceDrafter) and drafter.drafts_in_cycle and not gives_logits(drafter, wants)


def draft_for_rule(drafter: Drafter, wants: Wants, requests: Sequence[DraftRequest]) -> Draft:
    """Drafts the trees of a cycle, with the distributions where the rule wants them and the drafter has them."""
    if gives_logits(drafter, wants):
        return drafter.draft_with_logits(requests, sampled=wants is not Wants.PROBABILITIES)
    return drafter.draft(requests)
