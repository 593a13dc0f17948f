"""Small engines and sampling parameters the tests share, and a drafter that knows the answer."""

from __future__ import annotations

import dataclasses
import functools
import random

from specengine import Engine, SamplingParams
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.drafter import Drafter
from specengine.tensor_parallel.loading import LoadedModel, load_model
from tests.ops.verifying import PARAMS

GREEDY = SamplingParams(max_new_tokens=48)
SAMPLED = SamplingParams(max_new_tokens=48, temperature=0.9, top_p=0.95, top_k=50, seed=11)
SHAPED = dataclasses.replace(PARAMS["everything"], max_new_tokens=48, seed=4)


def ids(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@functools.cache
def tiny_model(name: str = "random:tiny-llama", dtype: str = "float32") -> LoadedModel:
    return load_model(name, device="cpu", dtype=dtype)


def tiny_engine(
    drafter: str | Drafter = "prompt_lookup,adaptive=false", *, eos: frozenset[int] = frozenset(), **options
) -> Engine:
    """A random model without tokenizer; its drafter drafts whatever a pass costs here."""
    return Engine(dataclasses.replace(tiny_model(), eos_token_ids=eos), drafter=drafter, **options)


class Oracle(Drafter):
    """Drafts the known continuation to a random depth among random wrong nodes: acceptance of every shape."""

    name = "oracle"

    def __init__(self, answers: list[list[int]], vocab: int, nodes: int = 24, seed: int = 0) -> None:
        self.answers, self.vocab, self.nodes, self.random = answers, vocab, nodes, random.Random(seed)

    @property
    def max_nodes(self) -> int:
        return self.nodes

    def draft(self, requests) -> Draft:
        return Draft(requests, [self._draft_one(request) for request in requests])

    def _draft_one(self, request) -> DraftTree:
        answer = next(a for a in self.answers if a[: len(request.tokens)] == request.tokens)
        limit, draw = request.draft_limit, self.random
        right = answer[len(request.tokens) :][: draw.randint(0, min(limit, self.nodes - 1))]
        tokens, parents, depths, last = [request.tokens[-1]], [-1], [0], 0
        while len(tokens) < self.nodes and limit > 0:
            if right and draw.random() < 0.4:
                parent, token = last, right.pop(0)
                last = len(tokens)
            else:
                parent, token = draw.randrange(len(tokens)), draw.randrange(self.vocab)
                if depths[parent] >= limit:
                    continue
            tokens.append(token), parents.append(parent), depths.append(depths[parent] + 1)
            if draw.random() < 0.03:
                break
        return DraftTree(tokens, parents)


def oracle_engine(prompts, params, *, seed: int = 0, nodes: int = 24, **options) -> Engine:
    """A tiny engine whose drafter knows what plain decoding says after these prompts."""
    plain = tiny_engine("none").generate(prompts, params)
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    return tiny_engine(Oracle(answers, tiny_model().config.vocab_size, nodes, seed), **options)
