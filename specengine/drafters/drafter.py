"""A drafter: it drafts a tree per request, observes what was committed, and releases what it holds of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.rules.base import Wants

if TYPE_CHECKING:
    from specengine.cache.kv_cache import KVCache
    from specengine.models.hidden_states import HiddenStates
    from specengine.models.transformer import Transformer
    from specengine.ops.weight import Projection
    from specengine.tokenizer import Tokenizer


class Drafter(ABC):
    """Drafts a tree per request and cycle. Node 0 is the root: the last committed token.

    A drafter is three methods: draft, observe, release. It keeps its memory of a request in
    `request.drafter_states[self]`, so one drafter serves any batch. The rest are facts, and calls of the engine that by
    default do nothing.

    name: as in `--drafter NAME`, with _ for -; the key of the class in DRAFTERS.  config_type: a frozen dataclass of
    the options.  takes_path: whether NAME:PATH is allowed.
    offers: the rules' wants that it can serve. Any tree serves NOTHING. Any tree serves SAMPLES too, as deterministic
    nodes without a distribution.
    hidden_state_layers: rising; layers of the target whose input it reads, beside the last hidden state.
    reads_hidden_states: whether it reads the target's hidden states, of prompts and of committed paths.
    reads_choices: whether it reads the target's likeliest token after each node.
    drafts_in_cycle: whether it drafts inside captured cycles on a GPU. All others draft on the host between two cycles,
    which costs their overlap.
    projections: its linear layers, whose kernels the engine tunes before the first cycle on a GPU.
    page_bytes: device memory that it needs beside each page of the target's cache.
    device_rows: the rows for one request in its largest pass of captured cycles; the memory plan counts them.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[Any]]
    takes_path: ClassVar[bool] = False
    offers: ClassVar[frozenset[Wants]] = frozenset({Wants.NOTHING, Wants.SAMPLES})

    config: object  # an instance of config_type
    path: str | None = None  # of its weights or texts, as given

    hidden_state_layers: tuple[int, ...] = ()
    reads_hidden_states: bool = False
    reads_choices: ClassVar[bool] = False
    drafts_in_cycle: bool = False

    def __init__(self, config: object, path: str | None, target: Transformer) -> None:
        self.config, self.path = config, path

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        """Returns one tree per request, at most `draft_limit` levels deep."""

    def observe(  # noqa: B027 (many drafters learn nothing)
        self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None
    ) -> None:
        """Learns from the tokens that a cycle committed; called after every cycle on the CPU, before the next draft.

        On CUDA it is called for drafters that draft on the host; observe_on_device() takes its place otherwise.
        draft: what this cycle verified.
        committed: each request's accepted tokens and the bonus token.
        hidden_states: those of the committed paths' nodes, root first, request after request; None where the drafter
        reads none. The token after node i of a path is committed token i. By default nothing is learned.
        """

    def release(self, request: DraftRequest) -> None:  # noqa: B027 (most drafters hold nothing else)
        """Gives back what the drafter holds of a request that is over; its drafter_states are cleared afterwards.

        Any thread may call it at any moment.
        """

    # Facts

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
        """Slots of the cache that a request needs after its longest text."""
        return self.max_nodes

    @property
    def projections(self) -> Sequence[Projection]:
        return ()

    @property
    def page_bytes(self) -> int:
        return 0

    @property
    def device_rows(self) -> int:
        return 0

    # Beside the target's cache, and its prompts

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:  # noqa: B027
        """Raises ValueError where files or a model of the drafter have the token ids of another tokenizer."""

    def attach(self, cache: KVCache) -> None:  # noqa: B027
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

        tokens: the prompt's length.  answer: the answer's, at most.  batch: the size of its batch.
        The answer is the request's `drafter_reads`. Of a request that it does not read it keeps nothing beside the
        target's cache, and drafts nothing that needs this.
        """
        return True

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:  # noqa: B027
        """Observes the prompt's tokens from position `start` on, chunk by chunk.

        hidden_states: the chunk's. The prompt's last token is the first root and in no chunk, so the token after each
        chunk's last one is known. The first chunk begins after the pages that are shared with earlier requests; see
        filled().
        """

    def observe_choices(  # noqa: B027
        self, draft: Draft, committed: Sequence[list[int]], choices: Sequence[Sequence[int]]
    ) -> None:
        """Observes a cycle of a drafter that reads choices; called before observe(), of cycles with drafts alone.

        choices: for each request the likeliest token after every node of its tree, by the target's unprocessed
        logits. There may be more choices than nodes.
        """

    # Rules that read the distributions which nodes come from

    def gives_logits(self, wants: Wants) -> bool:
        """Returns whether the drafts for such a rule come with their distributions."""
        return False

    def draft_for(self, wants: Wants, requests: Sequence[DraftRequest]) -> Draft:
        """Drafts for a rule, with the children's distributions on the target's device where gives_logits() says so."""
        return self.draft(requests)

    def room_for_logits(self, nodes: int) -> DraftLogits | None:
        """Returns buffers for the distributions of `nodes` nodes in all; None: its drafts never have any.

        A captured cycle reads the buffers, so whatever in them is no tensor must hold for every draft.
        """
        return None

    # Captured cycles on a GPU, of drafters that draft in them

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        """Returns one tree of batch.nodes rows per slot, from device tensors alone: a graph reads no host memory.

        The tree has at most batch.nodes - 1 levels, so deeper levels are not drafted; of one node it is the root.
        Sets batch.draft_logits where gives_logits(batch.wants).
        """
        raise NotImplementedError(f"{self.name} drafts on the host")

    def new_device_state(self, slots: int) -> Any:
        """Returns the state of at most `slots` requests, for DraftBatch.drafter_state; None: it keeps none there."""
        return None

    def load(self, state: Any, slot: int, request: DraftRequest) -> None:  # noqa: B027
        """Moves a request into an idle slot of a device state; all slots are idle at first."""

    def unload(self, state: Any, slot: int, request: DraftRequest | None) -> None:  # noqa: B027
        """Makes a slot idle, and moves its request back to the host; None: the request was released."""

    def before_cycle(self, batch: DraftBatch) -> None:  # noqa: B027
        """Prepares the device state for a cycle of batch.nodes nodes; called by the host before each, in no graph.

        A cycle of width 1 drafts nothing and may leave work for later. Here the work is done where a draft needs it,
        or where too much waits. The host must not wait for the device.
        """

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:  # noqa: B027
        """Observes a captured cycle, in place of observe(). hidden_states: those of all rows in its pass.

        By default nothing is kept: the next draft finds the committed tokens in the batch's history.
        """
