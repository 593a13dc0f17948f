"""An EAGLE drafter driven by hand beside a tiny target."""

import itertools

import torch

from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters import load_drafter
from tests.drafters.eagle_files import Reading, layouts, write_drafter
from tests.drafters.requests import sequence_of
from tests.engines import tiny_model

CPU = torch.device("cpu")
LAYOUTS = layouts()
PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 40)), [4, 4]]
OPTIONS = "nodes=24,levels=4,top_k=4,adaptive=false"


class Bench:
    """A drafter driven by hand beside a target: what the engine would show it of every token."""

    def __init__(self, spec, prompts, options=OPTIONS, model=None):
        model = model or tiny_model().target
        self.drafter = load_drafter(f"{spec},{options}", model)
        self.target = model.with_hidden_state_layers(tuple(range(model.config.num_layers + 1)))
        self.cache = model.new_cache()
        self.drafter.attach(self.cache)
        self.requests = [sequence_of(prompt) for prompt in prompts]
        for request in self.requests:
            request.pages = self.cache.allocate(400)
            hidden_states, known = self.hidden_states(request.tokens), len(request.tokens) - 1
            for start in range(0, known, 16):
                self.drafter.observe_prompt(
                    request, start, self.shown(hidden_states, slice(start, min(known, start + 16)))
                )

    def hidden_states(self, tokens):
        """Of all positions, by a pass over the whole text."""
        pages = self.cache.allocate(len(tokens))
        rows = TreeBatch.chains([tokens], CPU)
        hidden_states = self.target.hidden_states(rows, self.cache, self.cache.batch([pages], [0]))
        self.cache.free(pages)
        return hidden_states

    def shown(self, hidden_states, rows):
        hidden_state_layers = (
            hidden_states.at_layers[:, list(self.drafter.hidden_state_layers)]
            if self.drafter.hidden_state_layers
            else None
        )
        return type(hidden_states)(
            hidden_states.last[rows], None if hidden_state_layers is None else hidden_state_layers[rows]
        )

    def commit(self, committed):
        """Every request goes on by its own tokens."""
        shown = []
        for request, tokens in zip(self.requests, committed, strict=True):
            first = len(request.tokens) - 1
            request.commit(tokens[:-1], tokens[-1])
            shown.append(self.shown(self.hidden_states(request.tokens), slice(first, first + len(tokens))))
        parts = [torch.cat([each.last for each in shown])]
        parts.append(torch.cat([each.at_layers for each in shown]) if self.drafter.hidden_state_layers else None)
        self.drafter.observe(Draft(self.requests, []), committed, type(shown[0])(*parts))

    def grown(self):
        """The candidates of a draft, and the logits of every pass [rows, Vd]."""
        seen, logits = [], self.drafter.network.logits
        self.drafter.network.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
        self.drafter.native = None  # the passes are to be seen one by one
        ready = [request for request in self.requests if self.drafter.reader.pairs_of(request).count]
        grown, begin = [], self.drafter._growing
        self.drafter._growing = lambda *rest: grown.append(begin(*rest)) or grown[-1]
        self.drafter.grow(ready, 0.0)
        self.drafter.network.logits, self.drafter._growing = logits, begin
        (trees,) = grown
        return ready, trees, seen


def spec_of(tmp_path, name="official", **changes):
    drafter, config, state = LAYOUTS[name]
    return f"{drafter}:{write_drafter(tmp_path / 'draft', config | changes, state)}"


def reading_of(drafter, config, state, kind=Reading):
    """What a drafter should compute beside the tiny target."""
    target = tiny_model().target
    embedding = torch.empty(320, 64)
    target.ops.layer.gather_rows(target.embedding, torch.arange(320, dtype=torch.int32), embedding)
    return kind(drafter, config, state, embedding, target.logits(torch.eye(64)).T)


def candidate_path(tokens, parents, node):
    """From below the root, which is candidate 0, to another one."""
    path = []
    while node > 0:
        path.append(tokens[node].item())
        node = parents[node].item()
    return path[::-1]


def check_against(reading, bench):
    """Every distribution of a draft is the reading's, and so are the candidates made of it."""
    ready, trees, seen = bench.grown()
    k, checked = bench.drafter.config.top_k, 0
    tokens, parents, _, scores = trees.columns
    ends = [*itertools.accumulate(level.size for level in trees.plan.levels)]
    for b, request in enumerate(ready):
        hidden_states = bench.hidden_states(request.tokens)
        known = len(request.tokens) - 1
        fused = reading.fused(hidden_states.last[:known], list(hidden_states.at_layers[:known].unbind(1)))
        for level, logits in enumerate(seen):
            rows = logits.view(len(ready), -1, logits.shape[1])[b]
            first = 1 + (ends[level - 1] if level else 0)
            for row, ours in enumerate(rows):
                children = slice(first + row * k, first + (row + 1) * k)
                (parent,) = set(parents[b, children].tolist())
                path = candidate_path(tokens[b], parents[b], parent)
                theirs = reading.logits(fused, [*request.tokens[1:], *path])
                assert (ours - theirs).abs().max() / theirs.abs().max() < 1e-4
                best = theirs.sort(descending=True, stable=True)
                assert tokens[b, children].tolist() == reading.tokens()[best.indices[:k]].tolist()
                own = scores[b, children] - scores[b, parent]
                assert torch.allclose(own.double(), theirs.log_softmax(-1)[best.indices[:k]], atol=1e-4)
                checked += 1
    assert checked == len(ready) * (1 + 3 * bench.drafter.config.width)
