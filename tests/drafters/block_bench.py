"""A block drafter driven by hand beside a tiny target, and what the reading of its authors needs of that target."""

import functools

import torch

from tests.drafters.block_files import MASK, write
from tests.drafters.eagle_bench import PROMPTS, Bench
from tests.engines import tiny_model

COMMITTED = ([[1, 2, 3], [8], [9, 9], [30, 31]], [[6], [2, 8, 5], [7], [1]], [[5, 4, 3, 2], [1], [2], [3]])
CHAIN = "tree=chain,adaptive=false"


@functools.cache
def target_ends():
    """The target's embedding and head, float32 [V, hidden]."""
    target = tiny_model().target
    vocabulary = torch.arange(target.config.vocab_size, dtype=torch.int32)
    embedding = torch.empty(len(vocabulary), target.config.hidden_size)
    target.ops.layer.gather_rows(target.embedding, vocabulary, embedding)
    assert len(vocabulary) > MASK
    return embedding, target.logits(torch.eye(target.config.hidden_size)).T.contiguous()


def bench_of(name, folder, config, state, options=CHAIN):
    return Bench(f"{name}:{write(folder / name, config, state)}", PROMPTS, options)


def drafts(bench):
    """Of every cycle: the features of a request's text, by layer, its anchor, and its tree."""
    for committed in (None, *COMMITTED):
        if committed:
            bench.commit(committed)
        for request, tree in zip(bench.requests, bench.drafter.draft(bench.requests).trees, strict=True):
            known = len(request.tokens) - 1
            if known:
                yield bench.hidden_states(request.tokens).at_layers[:known], request.tokens[-1], tree


def check_chains(bench, reading, layers=(0, 1)):
    """Every request's chain is the reading's, in every cycle. layers: of the target whose input is read."""
    count = 0
    for features, anchor, tree in drafts(bench):
        expected, _ = reading.chain(features[:, list(layers)], anchor)
        assert tree.tokens[1:] == expected and tree.parents == [*range(-1, len(expected))]
        count += 1
    assert count == 15  # a prompt of one token has no context at first
