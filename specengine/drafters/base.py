"""A drafter: it drafts a tree per request, observes what was committed, and releases what it holds of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from specengine.draft_policy.draft import Draft
from specengine.drafters.engine_views import DraftRequest
from specengine.rules.base import Wants

if TYPE_CHECKING:
    from specengine.models.hidden_states import HiddenStates
    from specengine.models.transformer import Transformer


class Drafter(ABC):
    """Drafts a tree per request and cycle. Node 0 is the root: the last committed token.

    A drafter keeps its memory of a request in `request.drafter_states[self]`, so one drafter serves any batch.
    Everything that only some drafters do is a capability of its own; see capabilities.py.

    name: as in `--drafter NAME`, with _ for -; the key of the class in DRAFTERS.  config_type: a frozen dataclass of
    the options.  takes_path: whether NAME:PATH is allowed.
    offers: the rules' wants that it can serve. Any tree serves NOTHING. Any tree serves SAMPLES too, as deterministic
    nodes without a distribution.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[Any]]
    takes_path: ClassVar[bool] = False
    offers: ClassVar[frozenset[Wants]] = frozenset({Wants.NOTHING, Wants.SAMPLES})

    config: object  # an instance of config_type
    path: str | None = None  # of its weights or texts, as given

    def __init__(self, config: object, path: str | None, target: Transformer) -> None:
        self.config, self.path = config, path

    @property
    def adaptive(self) -> bool:
        """Whether the tree's size may follow what pays; otherwise the tree is always the largest."""
        return True

    @property
    def drafts_chains(self) -> bool:
        """Whether no node of its trees ever has two children."""
        return False

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Nodes of the largest tree, root included."""

    @property
    def spare_slots(self) -> int:
        """Slots of the cache that a request needs behind its longest text."""
        return self.max_nodes

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        """Returns one tree per request, at most `draft_limit` levels deep."""

    def observe(  # noqa: B027 (many drafters learn nothing)
        self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None
    ) -> None:
        """Learns from the tokens that a cycle committed; called after every cycle on the CPU, before the next draft.

        On CUDA it is called for drafters that draft on the host. In captured cycles observe_on_device() of a
        DeviceStateDrafter takes its place; other DeviceDrafters observe nothing there.
        draft: of this cycle; its trees are those that were verified.
        committed: of each request, its accepted tokens and the bonus token.
        hidden_states: of the committed paths' nodes, root first, request after request; None where the drafter does not
        read them. The token behind node i of a path is committed token i. By default nothing is learned.
        """

    def release(self, request: DraftRequest) -> None:  # noqa: B027 (most drafters hold nothing else)
        """Gives back what the drafter holds of a request that is over; its drafter_states are cleared afterwards.

        Any thread may call it at any moment.
        """
