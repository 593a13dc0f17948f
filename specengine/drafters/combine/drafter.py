"""Several drafters in one tree: `combine:prompt_lookup+eagle3` copies where text repeats itself and drafts elsewhere.

Parts draft in their order, each where it pays beside the parts before it. A part's options follow it, separated by
semicolons: `combine:prompt_lookup+eagle3:PATH;levels=5;beam=1,nodes=16`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from specengine._C import MAX_NODES
from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.policy import Source
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.combine.captured import CapturedPair
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.policies import charged, policy_of
from specengine.drafters.source_stats import count_sources
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.ops.weight import Projection
from specengine.rules.base import Wants
from specengine.tokenizer import Tokenizer
from specengine.utils.spec_string import Spec, check_range

NODES = 16  # of the largest tree, on the host


@dataclass(frozen=True)
class Config:
    """The options.

    nodes: of the largest tree, root included. 0: 16; in captured cycles, where rows of a pass cost less, as many as the
    network's own if these are more.
    adaptive: keep the nodes that pay, and skip parts that do not; otherwise every part drafts, and the likeliest nodes
    stay. It holds for every part that has this option and does not set its own.
    """

    nodes: int = 0
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.nodes != 0:
            check_range("nodes", self.nodes, 2, MAX_NODES)


class Combine(Drafter):
    """Joins the trees of its parts; a node's chance depends on which of them draft it.

    parts: Drafters that are Sources. Captured cycles draft with prompt_lookup and one network that drafts in
    them: a copy of the text joins the network's candidates before the likeliest are chosen. Its chances are not learned
    there.
    """

    name = "combine"
    config_type = Config
    config: Config
    takes_path = True

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        from specengine.drafters import load_drafter  # which finds this class by its name

        super().__init__(config, path, target)
        texts = [text.strip().replace(";", ",") for text in (path or "").split("+")]
        if len(texts) < 2 or not all(texts):
            raise ValueError(
                f"drafter: combine: expected at least two drafters as in combine:prompt_lookup+eagle3, got {path!r}"
            )
        specs = texts if config.adaptive else [_not_adaptive(text, target) for text in texts]
        self.parts = [load_drafter(spec, target) for spec in specs]
        sources = list[Source]()
        for part in self.parts:
            name = part.name
            if not isinstance(part, Source):
                raise ValueError(f"drafter: combine: {name} gives its nodes no chances to be merged by")
            sources.append(part)
            if part.gives_logits(Wants.SAMPLES):
                raise ValueError(
                    f"drafter: combine: {name} draws its children, as with sample=true; expected likeliest ones"
                )
        layers = {part.hidden_state_layers for part in self.parts if part.hidden_state_layers}
        if len(layers) > 1:
            raise ValueError(f"drafter: combine: its drafters read different layers of the target: {sorted(layers)}")
        self.hidden_state_layers = layers.pop() if layers else ()
        self.reads_hidden_states = any(part.reads_hidden_states for part in self.parts)
        self._captured = CapturedPair.of(self.parts, target.device) if target.ops.on_device else None
        self.drafts_in_cycle = self._captured is not None
        self.policy = policy_of(self, target, costs, sources, self.parts)
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
        own = max(NODES, self._captured.network.max_nodes) if self._captured else NODES
        return self.config.nodes or own

    @property
    def spare_slots(self) -> int:
        return max(self.max_nodes, *(part.spare_slots for part in self.parts))

    @property
    def page_bytes(self) -> int:
        return sum(part.page_bytes for part in self.parts)

    def attach(self, cache: KVCache) -> None:
        for part in self.parts:
            part.attach(cache)

    def filled(self, request: DraftRequest) -> int:
        return min(part.filled(request) for part in self.parts)

    def reads(self, tokens: int, answer: int, batch: int) -> bool:
        """Returns whether any part reads such a request; then all do, as one mark says that a page is filled."""
        answers = [
            self.policy.reads(number, tokens, answer, batch)
            for number, part in enumerate(self.parts)
            if part.page_bytes
        ]
        return any(answers)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        for part in self.parts:
            part.check_tokenizer(tokenizer)

    def observe_prompt(self, request: DraftRequest, start: int, hidden_states: HiddenStates) -> None:
        for number, part in enumerate(self.parts):
            if request.drafter_reads if part.page_bytes else part.reads_hidden_states:
                with charged(self.policy, number, len(hidden_states)):
                    part.observe_prompt(request, start, hidden_states)

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        joined = Draft(draft.requests, draft.trees)  # a part's own policy learns nothing
        for part in self.parts:
            part.observe(joined, committed, hidden_states if part.reads_hidden_states else None)
        for i, tree in enumerate(draft.steps[-1].trees if draft.steps else ()):
            sources = [(self._names[step.source], step.drafted[i]) for step in draft.steps]
            count_sources(draft.requests[i], tree, sources, committed[i])
        self.policy.observe(draft, committed)

    def release(self, request: DraftRequest) -> None:
        for part in self.parts:
            part.release(request)

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft(requests)

    @property
    def device_rows(self) -> int:
        return self._captured.network.device_rows if self._captured else 0

    def new_device_state(self, slots: int) -> Any:
        return self._pair.network.new_device_state(slots)

    def load(self, state: Any, slot: int, request: DraftRequest) -> None:
        self._pair.network.load(state, slot, request)

    def unload(self, state: Any, slot: int, request: DraftRequest | None) -> None:
        self._pair.network.unload(state, slot, request)

    def before_cycle(self, batch: DraftBatch) -> None:
        self._pair.network.before_cycle(batch)

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        return self._pair.draft(batch)

    def observe_on_device(self, batch: DraftBatch, hidden_states: HiddenStates) -> None:
        self._pair.network.observe_on_device(batch, hidden_states)

    @property
    def _pair(self) -> CapturedPair:
        assert self._captured is not None  # the engine asks drafts_in_cycle first
        return self._captured


def _not_adaptive(text: str, target: Transformer) -> str:
    """Returns a part's spec with `adaptive=false`, where the part has this option and does not set it."""
    from specengine.drafters import best_drafter, drafter_kind  # which find this module's class by its name

    name = Spec.parse(text, "drafter").name
    kind = drafter_kind(best_drafter(target).name if name == "auto" else name)
    has_option = any(field.name == "adaptive" for field in fields(kind.config_type))
    return f"{text},adaptive=false" if has_option and "adaptive=" not in text else text
