"""What a draft network reads of the text, and what is remembered of each request, on the host and on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specengine.cache.kv_cache import KVCache
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.growth import Begun
from specengine.drafters.native import Unread

if TYPE_CHECKING:
    from specengine.models.hidden_states import HiddenStates


class Reader(ABC):
    """Reads the text for one network, and opens its drafts.

    Pairs of hidden state and token, rows of text, or the last hidden state: the readers of this package. The methods of
    Drafter with these names say what they do; a NetworkDrafter hands them on.
    hidden_state_layers, reads_hidden_states: see Drafter.  page_bytes: device memory beside a page of the target's.
    device_rows: the rows for one request in its largest pass of captured cycles; the memory plan counts them.
    """

    hidden_state_layers: tuple[int, ...] = ()
    reads_hidden_states: bool = False
    page_bytes: int = 0
    device_rows: int = 1

    def attach(self, cache: KVCache) -> None:  # noqa: B027 (a reader may keep nothing)
        """Allocates its memory beside the target's cache. Raises ValueError for a second engine's cache."""

    def filled(self, request: DraftRequest) -> int:
        """Returns how many of a request's first slots hold their final keys and values."""
        return len(request.tokens)

    def observe_prompt(  # noqa: B027
        self, request: DraftRequest, start: int, hidden_states: HiddenStates
    ) -> None:
        """Reads a chunk of a prompt from position `start` on."""

    def observe(  # noqa: B027
        self, requests: Sequence[DraftRequest], committed: Sequence[list[int]], hidden_states: HiddenStates | None
    ) -> None:
        """Takes what a cycle committed."""

    @abstractmethod
    def can_draft(self, request: DraftRequest) -> bool:
        """Returns whether there is what a draft for a request begins from."""

    def limit(self, request: DraftRequest) -> int:
        """Returns the deepest level worth drafting for a request; 0: it cannot be drafted for."""
        return request.draft_limit if self.can_draft(request) else 0

    def skip(self, requests: Sequence[DraftRequest]) -> None:  # noqa: B027
        """Reads where much waits: this cycle drafts nothing, and the next draft should not become a long one."""

    @abstractmethod
    def open(self, requests: Sequence[DraftRequest], levels: int) -> Begun:
        """Begins a draft of so many levels for requests that can be drafted for."""

    def unread(self, requests: Sequence[DraftRequest]) -> Unread:
        """Begins the same as the native draft of a network takes it."""
        raise NotImplementedError("its network has no native draft")

    @abstractmethod
    def new_device_state(self, slots: int) -> Any:
        """Returns the state of at most `slots` requests, for DraftBatch.drafter_state; all slots are idle."""

    @abstractmethod
    def load(self, state: Any, slot: int, request: DraftRequest) -> None:
        """Moves a request into an idle slot of a device state."""

    @abstractmethod
    def unload(self, state: Any, slot: int, request: DraftRequest | None) -> None:
        """Makes a slot idle, and moves its request back to the host; None: the request was released."""

    def before_cycle(self, batch: DraftBatch) -> None:  # noqa: B027
        """Catches up where a draft needs it, or where too much waits; called before each cycle, in no graph."""

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:  # noqa: B027
        """Takes what a captured cycle committed. hidden_states: those of all rows in its pass."""

    @abstractmethod
    def open_on_device(self, batch: DraftBatch, levels: int) -> Begun:
        """Begins a draft inside a captured cycle."""
