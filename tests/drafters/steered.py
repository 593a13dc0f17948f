"""Records the drafts of a drafter under test, while a drafter that knows the answer decides the acceptance."""

from __future__ import annotations

import dataclasses

from specengine import Engine
from tests.engines import Oracle, ids, tiny_model


class Steered(Oracle):
    """drafts: per cycle, the tokens of every request and the inner drafter's trees."""

    def __init__(self, inner, answers, vocab, nodes=12, seed=0) -> None:
        super().__init__(answers, vocab, nodes, seed)
        self.inner, self.drafts = inner, []
        self.reads_hidden_states, self.hidden_state_layers = inner.reads_hidden_states, inner.hidden_state_layers

    @property
    def max_nodes(self):
        return max(self.nodes, self.inner.max_nodes)

    def draft(self, requests):
        before = [list(request.tokens) for request in requests]
        self.drafted = self.inner.draft(requests)
        self.drafts.append((before, self.drafted.trees))
        return super().draft(requests)

    @property
    def page_bytes(self):
        return self.inner.page_bytes

    def attach(self, cache):
        self.inner.attach(cache)

    def observe_prompt(self, request, start, hidden_states):
        self.inner.observe_prompt(request, start, hidden_states)

    def filled(self, request):
        return self.inner.filled(request)

    def observe(self, draft, committed, hidden_states):
        self.inner.observe(self.drafted, committed, hidden_states if self.reads_hidden_states else None)

    def release(self, request):
        self.inner.release(request)


def steer(drafter, prompts, params, seed=0, model=None) -> Steered:
    """Runs prompts with every kind of acceptance; the output must stay that of plain decoding."""
    model = dataclasses.replace(model or tiny_model(), eos_token_ids=frozenset())
    plain = Engine(model, drafter="none").generate(prompts, params)
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    steered = Steered(drafter, answers, model.config.vocab_size, seed=seed)
    assert ids(Engine(model, drafter=steered, max_batch_size=4).generate(prompts, params)) == ids(plain)
    return steered
