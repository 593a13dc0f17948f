"""TextDrafts: the trees of single texts, and their joint tree."""

from random import Random

import pytest
import torch

from specengine._C import CONTINUATION_KINDS, SuffixAutomaton, TextCorpus, TextDrafts, sort_suffixes
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree
from tests.draft_trees.reference import count_sources, join_trees, judge_nodes


def random_text(draw: Random) -> list[int]:
    return [draw.randrange(5) for _ in range(draw.choice([5, 80]))]


def automaton(text: list[int]) -> SuffixAutomaton:
    made = SuffixAutomaton()
    made.append(text)
    return made


def corpus(text: list[int]) -> TextCorpus:
    tokens = torch.tensor(text, dtype=torch.int32)
    order = torch.empty_like(tokens)
    sort_suffixes(tokens, order)
    return TextCorpus(tokens, order)


def test_the_joint_tree_is_that_of_the_reference():
    sizes = set()
    for seed in range(150):
        draw = Random(seed)
        texts = [draw.choice([automaton, corpus])(random_text(draw)) for _ in range(draw.randint(1, 4))]
        rates = [[draw.random() for _ in range(CONTINUATION_KINDS)] for _ in texts]
        context = [draw.randrange(6) for _ in range(draw.choice([1, 3]))]
        sizing = draw.choice([2, 16, 40]), draw.choice([0, 3, 15]), draw.choice([1, 4])
        least = draw.choice([0.0, 0.1])
        drafts = TextDrafts(texts, context, *sizing, rates, least)
        names = [draw.choice("abc") for _ in texts]
        text = [draw.randrange(5) for _ in range(draw.randint(0, 4))]
        expected, judged, sources = None, [], []
        for number, (each, own) in enumerate(zip(texts, rates, strict=True)):
            tokens, parents, kinds = each.continuations(context, *sizing, own, least)
            tree = ScoredTree(tokens, parents, [1.0, *(own[kind] for kind in kinds[1:])])
            if expected is None or len(tokens) > 1:
                expected = tree if expected is None else join_trees(expected, tree)
            judged += [(number, kinds[node], accepted) for node, accepted in judge_nodes(tree, text)]
            sources.append((names[number], tree))
        assert ScoredTree(*drafts.tree()) == expected, seed
        assert drafts.judge(text) == judged, seed
        verified = DraftTree(expected.tokens[:8], expected.parents[:8])
        counts = drafts.count(verified.tokens, verified.parents, names, text)
        assert counts == count_sources(verified, sources, text), seed
        sizes.add(len(expected.tokens))
    assert len(sizes) > 20


def test_what_is_no_text_is_refused():
    whole = [1.0] * CONTINUATION_KINDS
    text = automaton([1, 2, 3, 1])
    with pytest.raises(ValueError, match="rates: expected 1 lists"):
        TextDrafts([text], [1], 4, 4, 4, [whole, whole], 0.0)
    with pytest.raises(ValueError, match="rates: expected 0 lists"):
        TextDrafts([], [1], 4, 4, 4, [], 0.0)
    with pytest.raises(ValueError, match="rates: expected 30, got 1"):
        TextDrafts([text, text], [1], 4, 4, 4, [whole, [0.5]], 0.0)
    with pytest.raises(ValueError, match="context: "):
        TextDrafts([text], [], 4, 4, 4, [whole], 0.0)
    with pytest.raises(ValueError, match="names: expected 1, got 0"):
        TextDrafts([text], [1], 4, 4, 4, [whole], 0.0).count([1], [-1], [], [])
