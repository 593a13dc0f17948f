"""Which scores a constrained cycle computes on the CPU: as few as its requests and its drafter read."""

from dataclasses import replace

import pytest

from specengine import Engine, SamplingParams
from specengine.models.transformer import Transformer
from tests.constraints.vocabulary import CHOICES, CONSTRAINTS, TOKENIZER, talking_model
from tests.engines import ids

PROMPTS = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("name a thing", "yes or no?", "the age", "x")]


@pytest.fixture
def computed(monkeypatch) -> set[tuple[str, bool]]:
    """The calls of the head: `logits` or `likeliest`, and whether for allowed tokens alone."""
    calls: set[tuple[str, bool]] = set()
    for name in ("logits", "likeliest"):
        original = getattr(Transformer, name)

        def spy(self, hidden_states, masks=None, *, name=name, original=original):
            calls.add((name, masks is not None))
            return original(self, hidden_states, masks)

        monkeypatch.setattr(Transformer, name, spy)
    return calls


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_scores_of_allowed_tokens_give_the_texts_of_all_scores(computed, drafter, temperature):
    """Log-probabilities are those of the whole vocabulary."""
    params = [
        SamplingParams(max_new_tokens=40, temperature=temperature, seed=3 + number, **given)
        for number, given in enumerate(CONSTRAINTS)
    ]
    few = Engine(talking_model(), drafter=drafter).generate(PROMPTS, params)
    assert computed == {("logits" if temperature else "likeliest", True)}
    computed.clear()
    every = Engine(talking_model(), drafter=drafter).generate(PROMPTS, [replace(own, logprobs=2) for own in params])
    assert ("logits", False) in computed and ("likeliest", True) not in computed
    assert ids(few) == ids(every)


def test_a_drafter_that_reads_the_likeliest_tokens_gets_all_scores(computed):
    params = SamplingParams(max_new_tokens=20, choices=CHOICES)
    Engine(talking_model(), drafter="lookahead").generate(PROMPTS, [params] * 4)
    assert computed == {("logits", False)}


def test_free_requests_compute_what_they_did(computed):
    engine = Engine(talking_model(), drafter="none")
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    assert computed == {("likeliest", False)}
    computed.clear()
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=5, temperature=0.8))
    assert computed == {("logits", False)}
