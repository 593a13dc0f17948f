"""A model whose next token is a function of the context, read from a key/value cache as a transformer would read it."""

from itertools import pairwise
from types import SimpleNamespace

import torch

from specengine import SamplingParams
from specengine._C import PAGE_SIZE
from specengine.cache.kv_cache import KVCache
from specengine.ops import native


class FunctionModel:
    """The keys in its cache are the tokens themselves, so what is moved or rolled back wrongly is read wrongly."""

    device = torch.device("cpu")
    head = None

    def __init__(self, function, vocab, max_position=10_000):
        self.function, self.config = (
            function,
            SimpleNamespace(vocab_size=vocab, max_position=max_position, gated_delta=None),
        )
        argmax = SimpleNamespace(linear_argmax=lambda hidden_states, head: hidden_states[:, 0].int())
        self.ops = SimpleNamespace(compact_kv=native.compact_kv, prefill_rows=8, on_device=False, **vars(argmax))

    def new_cache(self, pages=None):
        return KVCache(1, 1, 1, torch.float32, self.device, pages)

    def ensure_positions(self, count):
        assert count <= self.config.max_position

    def hidden(self, tree, cache, place):
        starts, out = tree.row_start.tolist(), []
        for b, (first, end) in enumerate(pairwise(starts)):
            length, pages = int(place.lengths[b]), place.block_table[b].tolist()
            for node, row in enumerate(range(first, end)):
                page, slot = pages[(length + node) // PAGE_SIZE], (length + node) % PAGE_SIZE
                cache.k[0, page, 0, slot] = cache.v[0, page, 0, slot] = float(tree.tokens[row])
            tokens = cache.k[0, pages, 0].flatten()[: length + end - first].int().tolist()
            texts = {-1: tokens[:length]}
            for node, parent in enumerate(tree.parents[first:end].tolist()):
                texts[node] = [*texts[parent], tokens[length + node]]
                assert len(texts[node]) <= self.config.max_position
                out.append(self.function(texts[node]))
        return torch.tensor(out, dtype=torch.float32)[:, None]


def run(drafter, target, requests):
    """One cycle of a greedy loop: (tree, tokens committed) of every request."""
    draft = drafter.draft(requests)
    committed, choices = [], []
    for request, tree in zip(requests, draft.trees, strict=True):
        texts = {-1: request.tokens[:-1]}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            texts[node] = [*texts[parent], token]
        said = [target(texts[node]) for node in range(len(tree.tokens))]
        node, tokens = 0, []
        while node is not None:
            tokens.append(said[node])
            node = next((n for n in range(len(said)) if (tree.parents[n], tree.tokens[n]) == (node, tokens[-1])), None)
        request.tokens += tokens
        committed.append(tokens), choices.append(said)
    drafter.observe_choices(draft, committed, choices)
    drafter.observe(draft, committed, None)
    return list(zip(draft.trees, committed, strict=True))


def sequence_of(tokens, limit=10_000):
    """A request with the fields that drafters read; its drafts are never limited."""
    tokens, about = list(tokens), {"limit": limit, "draft_limit": 64, "params": SamplingParams()}
    about |= {"adapter": None, "sharing": None, "shareable_tokens": lambda filled: []}
    return SimpleNamespace(tokens=tokens, prompt_length=len(tokens), drafter_states={}, **about)


def paths_of(tree):
    """Every path from the root, without it."""
    paths = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def prefixes(paths):
    return {tuple(path[:i]) for path in paths for i in range(1, len(path) + 1)}


def pool_of(pool):
    return {token: [tuple(phrase) for phrase in pool.newest(token, pool.width)] for token in pool.tokens()}
