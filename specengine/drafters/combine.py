"""Several drafters in one tree: `combine:prompt_lookup+eagle3` copies where text repeats itself and drafts elsewhere.

Each drafter is asked in cycles where it has paid of late, which is learned by how much the tree so far promises: behind
a long copy a network has nothing to add. The first one is cheap, and asked wherever it loses little. A part's options
follow it, separated by semicolons: `combine:prompt_lookup+eagle3:PATH;levels=5;beam=1,nodes=16`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specengine._C import MAX_NODES
from specengine.draft_policy.agreement import Agreement, JointTree
from specengine.draft_policy.cost_model import CostModel, costs_of
from specengine.draft_policy.overhead import Overhead
from specengine.draft_policy.pauses import Pauses
from specengine.draft_policy.tree_choice import cycle_seconds
from specengine.draft_trees.scored_tree import Cut, ScoredTree, cut_trees
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.base import Drafter
from specengine.drafters.scored_drafter import ScoredDrafter
from specengine.drafters.source_stats import count_sources
from specengine.models.hidden_states import HiddenStates
from specengine.utils.spec_string import check_range

if TYPE_CHECKING:
    from specengine.cache.kv_cache import KVCache
    from specengine.models.transformer import Transformer
    from specengine.ops.weight import Projection
    from specengine.tokenizer import Tokenizer

# Copies cost little, and who is not asked misses where one begins.
BEARABLE = 0.05
PROMISES = (1.05, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0)  # tokens of a cycle by the tree so far


@dataclass(frozen=True)
class Config:
    """nodes: of the largest tree, root included.  adaptive: keep the nodes that pay and ask the drafters that do, else
    ask all and keep the likeliest nodes; parts that do not say otherwise do the same."""

    nodes: int = 16
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)


@dataclass
class State:
    """What is remembered of a request. parts: by each part.  tree: the last draft's.  sources: the trees that it was
    made of, with their parts' names.  joints: how they were joined."""

    parts: list[Any]
    tree: DraftTree | None = None
    sources: list[tuple[str, ScoredTree]] = field(default_factory=list)
    joints: list[tuple[Agreement, JointTree]] = field(default_factory=list)


class PartView:
    """A request as one of the drafters sees it, with that one's own state."""

    def __init__(self, request: Any, part: int) -> None:
        self._sequence, self._part = request, part

    @property
    def drafter_state(self) -> Any:
        return self._sequence.drafter_state.parts[self._part]

    @drafter_state.setter
    def drafter_state(self, state: Any) -> None:
        self._sequence.drafter_state.parts[self._part] = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sequence, name)


class Combine(Drafter):
    """Joins the trees of its parts; a node's chance depends on which of them draft it."""

    name = "combine"
    config_type = Config
    config: Config
    takes_path = True

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CostModel | None = None) -> None:
        from specengine.drafters import load_drafter

        super().__init__(config, path, target)
        texts = [text.strip().replace(";", ",") for text in (path or "").split("+")]
        if len(texts) < 2 or not all(texts):
            raise ValueError(
                f"drafter: combine: expected at least two drafters as in combine:prompt_lookup+eagle3, got {path!r}"
            )
        whole = "" if config.adaptive else ",adaptive=false"
        self.parts = [load_drafter(text if "adaptive=" in text else text + whole, target) for text in texts]
        for part in self.parts:
            if not part.proposes:
                raise ValueError(f"drafter: combine: {part.name} gives its nodes no chances to be merged by")
        hidden_state_layers = {part.hidden_state_layers for part in self.parts if part.hidden_state_layers}
        if len(hidden_state_layers) > 1:
            raise ValueError(
                f"drafter: combine: its drafters read different layers of the target: {sorted(hidden_state_layers)}"
            )
        self.hidden_state_layers = hidden_state_layers.pop() if hidden_state_layers else ()
        self.reads_hidden_states = any(part.reads_hidden_states for part in self.parts)
        measured = config.adaptive and not target.ops.resident
        self._costs = (costs or costs_of(target)) if measured else None
        self._overhead = Overhead()
        self._agreements = [Agreement() for _ in self.parts]  # of a part with those before it
        bearable = [BEARABLE] + [0.0] * (len(self.parts) - 1)
        self._pauses = [[Pauses(loss) for _ in (0, *PROMISES)] for loss in bearable]
        kinds = [part.name for part in self.parts]
        self._names = [text if kinds.count(kind) > 1 else kind for kind, text in zip(kinds, texts, strict=True)]

    @property
    def projections(self) -> list[Projection]:
        return [projection for part in self.parts for projection in part.projections]

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    @property
    def spare_slots(self) -> int:
        return max(self.max_nodes, *(part.spare_slots for part in self.parts))

    @property
    def page_bytes(self) -> int:
        return sum(part.page_bytes for part in self.parts)

    def attach(self, cache: KVCache) -> None:
        for part in self.parts:
            part.attach(cache)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        for part in self.parts:
            part.check_tokenizer(tokenizer)

    def skips_reading(self, batch: int) -> bool:
        if self._costs is None:  # every cycle asks them all, and what their drafts save is not known
            return False
        keeping = [part.skips_reading(batch) for part in self.parts if part.page_bytes]
        return bool(keeping) and all(keeping)

    def observe_prompt(self, request, start: int, hidden_states: HiddenStates) -> None:
        for part, (view,) in zip(self.parts, self._views([request]), strict=True):
            part.observe_prompt(view, start, hidden_states)

    def filled(self, request) -> int:
        views = [view for (view,) in self._views([request])]
        return min(part.filled(view) for part, view in zip(self.parts, views, strict=True))

    def observe(self, requests: Sequence, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        for part, views in zip(self.parts, self._views(requests), strict=True):
            part.observe(views, committed, hidden_states if part.reads_hidden_states else None)
        for request, tokens in zip(requests, committed, strict=True):
            state = request.drafter_state
            count_sources(request, state.tree, state.sources, tokens)
            if self._costs is not None:
                for agreement, joint in state.joints:
                    agreement.observe(joint, tokens)

    def release(self, request) -> None:
        for part, (view,) in zip(self.parts, self._views([request]), strict=True):
            part.release(view)
        request.drafter_state = None

    def draft(self, requests: Sequence) -> list[DraftTree]:
        if not requests:
            return []
        began = self._overhead.begin(requests)
        parts = zip(self._names, self.parts, self._views(requests), self._pauses, self._agreements, strict=True)
        count, prefix = len(requests), sum(len(request.tokens) for request in requests) / len(requests)
        trees, asked, network = [ScoredTree.root(request.tokens[-1]) for request in requests], False, False
        best = self._cut(trees, prefix)
        for request in requests:
            request.drafter_state.sources, request.drafter_state.joints = [], []
        for number, (name, part, views, pauses, agreement) in enumerate(parts):
            promised = pauses[bisect_right(PROMISES, best.expected / count)]
            if self._costs is not None and promised.here(count):
                part.rest(views)
                continue
            begin = time.perf_counter()
            more = part.propose(views)
            if number and all(len(tree.tokens) == 1 for tree in more):
                continue  # there was nothing to draft from
            if asked:
                joints = [agreement.joined(*pair) for pair in zip(trees, more, strict=True)]
                for request, joint in zip(requests, joints, strict=True):
                    request.drafter_state.joints.append((agreement, joint))
            for request, tree in zip(requests, more, strict=True):
                request.drafter_state.sources.append((name, tree))
            trees = [joint.tree for joint in joints] if asked else more
            without, best = best, self._cut(trees, prefix)
            before = self._overhead[network]
            network = network or isinstance(part, ScoredDrafter)
            if self._costs is not None:
                plain, drafted = (cycle_seconds(self._costs, count, cut.nodes, prefix) for cut in (without, best))
                spent = drafted + self._overhead[network] + time.perf_counter() - begin
                saved = (plain + before) * best.expected / without.expected - spent
                promised.weigh(count, saved, plain)
                part.credit(views, saved)
            asked = True
        if self._costs is not None:
            seconds = cycle_seconds(self._costs, count, best.nodes, prefix) + time.perf_counter() - began
            self._overhead.expect(requests, network, began, seconds)
        for request, cut in zip(requests, best.trees, strict=True):
            request.drafter_state.tree = cut
        return best.trees

    def _cut(self, trees: Sequence, prefix: float) -> Cut:
        return cut_trees(trees, self._costs, prefix, self.config.nodes - 1)

    def _views(self, requests: Sequence) -> list[list[Any]]:
        """Every part's PartViews of the requests, which hold no view: they would wait for the garbage collector."""
        for request in requests:
            if request.drafter_state is None:
                request.drafter_state = State([None] * len(self.parts))
        return [[PartView(request, part) for request in requests] for part in range(len(self.parts))]
