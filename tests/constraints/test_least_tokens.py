"""The least length of a text without a grammar: its masks and cuts, against the definition."""

import random

import pytest

from specengine import SamplingParams
from specengine.draft_trees.tree import DraftTree
from tests.constraints.masks import masks_of
from tests.constraints.vocabulary import ENDS, THINK_END, grammars

STOP = ord("e")


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the root's child to this one."""
    return [*path_to(tree, tree.parents[node]), node] if node else []


@pytest.mark.parametrize("committed", range(4))
def test_no_end_is_among_the_first_tokens_of_any_path(committed):
    rng = random.Random(committed)
    for _ in range(20):
        least, count = rng.randrange(1, 8), rng.randrange(1, 20)
        constraint = grammars().constraint(
            SamplingParams(min_tokens=least, stop_token_ids=[STOP], ignore_eos=(ignored := rng.random() < 0.5))
        )
        constraint.advance([THINK_END] * committed)
        ends = {STOP} if ignored else {STOP, *ENDS}
        tokens = [0, *(rng.choice([*ENDS, STOP, 97, 98]) for _ in range(count - 1))]
        tree = DraftTree(tokens, [-1, *(rng.randrange(node) for node in range(1, count))])
        paths = [path_to(tree, node) for node in range(count)]
        early = [committed + len(path) < least for path in paths]  # one more token is one of the first
        assert masks_of(constraint, tree) == [
            [token for token in range(320) if not (forbidden and token in ends)] for forbidden in early
        ]
        kept = [
            node
            for node, path in enumerate(paths)
            if not any(tokens[each] in ends and early[tree.parents[each]] for each in path)
        ]
        cut = constraint.cut(tree)
        assert cut.drafted == kept and not cut.forced
        assert constraint.cut(tree, whole=True).drafted == [*range(count)]
        place = {node: new for new, node in enumerate(kept)}
        assert [*cut.tree.parents] == [place.get(tree.parents[node], -1) for node in kept]


def test_a_request_whose_text_cannot_end_early_anyway_has_no_constraint():
    made = grammars().constraint
    assert made(SamplingParams(stop_token_ids=[STOP])) is None
    assert made(SamplingParams(min_tokens=3, ignore_eos=True)) is None
    with pytest.raises(ValueError, match=r"^min_tokens: stop_token_ids are all"):
        made(SamplingParams(min_tokens=3, stop_token_ids=range(320)))
