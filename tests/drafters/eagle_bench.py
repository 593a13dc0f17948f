"""An EAGLE drafter driven by hand beside a tiny target."""

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters import load_drafter
from tests.drafters.eagle_files import layouts, write_drafter
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
        self.drafter.observe(self.requests, committed, type(shown[0])(*parts))

    def grown(self):
        """The candidates of a draft, and the logits of every pass [rows, Vd]."""
        seen, logits = [], self.drafter.network.logits
        self.drafter.network.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
        self.drafter._tree_draft = None  # the passes are to be seen one by one
        ready = [request for request in self.requests if self.drafter.pairs.state(request).pairs.count]
        grown, grow = [], self.drafter._candidates
        self.drafter._candidates = lambda *rest: grown.append(grow(*rest)) or grown[-1]
        self.drafter.grow(ready, 0.0)
        self.drafter.network.logits, self.drafter._candidates = logits, grow
        (trees,) = grown
        return ready, trees, seen


def spec_of(tmp_path, name="official", **changes):
    drafter, config, state = LAYOUTS[name]
    return f"{drafter}:{write_drafter(tmp_path / 'draft', config | changes, state)}"
