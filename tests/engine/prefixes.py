"""Prompts with a common prefix, and what a cache holds of them."""

import dataclasses

import torch

from specengine._C import PAGE_SIZE

SYSTEM = [3 + (7 * i * i + i) % 240 for i in range(200)]
FIRST, SECOND = [*SYSTEM, 5, 9, 13, 5, 9], [*SYSTEM, 11, 12, 11, 12, 11, 12, 11]
SPECS = {
    "none": "none",
    "prompt_lookup": "prompt_lookup,adaptive=false",
    "suffix": "suffix,adaptive=false",
    "lookahead": "lookahead,window=3,ngram=3,guesses=3,adaptive=false",
    "draft-model": "draft-model:self,layers=1,length=3,adaptive=false",
    "draft-model tree": "draft-model:self,layers=1,tree=3x2,adaptive=false",
    "ouroboros": "ouroboros:self,layers=1,window=3,ngram=3,length=3,warm=false,adaptive=false",
    "eagle": "eagle:{eagle},nodes=12,levels=3,adaptive=false",
    "eagle3": "eagle3:{eagle3},nodes=12,levels=3,adaptive=false",
    "eagle3 backbone": "eagle3:{eagle3},beam=1,top_k=3,levels=3,adaptive=false",
    "mtp": "mtp:{mtp},nodes=12,levels=3,adaptive=false",
    "dflash": "dflash:{dflash},nodes=12,top_k=3,adaptive=false",
    "dspark": "dspark:{dspark},nodes=12,top_k=3,adaptive=false",
    "domino chain": "domino:{domino},tree=chain,adaptive=false",
    "jetspec chain": "jetspec:{jetspec},tree=chain,adaptive=false",
    "pard": "pard:{pard},length=4,nodes=12,adaptive=false",
    "pard2": "pard:{pard2},length=4,nodes=12,adaptive=false",
    "p-eagle": "p-eagle:{p_eagle},length=4,nodes=12,adaptive=false",
    "fasteagle": "fasteagle:{fasteagle},top_k=3,adaptive=false",
    "medusa": "medusa:{medusa},nodes=8,adaptive=false",
    "glide": "glide:{glide},length=3,adaptive=false",
    "combine": "combine:prompt_lookup+eagle3:{eagle3};levels=3+glide:{glide},adaptive=false",
}


def said(engine, prompts, params):
    """All that a drafter and the target did."""
    outputs = engine.generate(prompts, dataclasses.replace(params, trace=True, logprobs=2))
    return [(output.token_ids, output.logprobs, output.trace, output.stats.tau) for output in outputs]


def whole(tokens):
    return (tokens - 1) // PAGE_SIZE * PAGE_SIZE


def caches(engine):
    own = [engine.drafter.small.cache] if hasattr(engine.drafter, "small") else []
    return [engine.cache, *own]


def copies(cache, pages):
    """All keys and values of some pages."""
    pools = sorted(cache._pools, key=lambda pool: pool.k.shape)
    return [each[:, pages].clone() for pool in pools for each in (pool.k, pool.v)]


def contents(engine, text):
    """Copies of the keys and values of a text, the target's and its drafter's."""
    found = []
    for cache in caches(engine):
        assert cache.prefixes.cached  # takes in what was given back
        found.append(copies(cache, cache._known.find(engine.core.sharing, text)))
    return found


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
