from types import SimpleNamespace

from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.source_stats import count_sources
from specengine.types import CycleTrace


def counted(tree, sources, committed, accepted, times=1) -> dict[str, tuple[int, int]]:
    """(drafted, accepted) by source of a request whose last cycle is counted."""
    request = SimpleNamespace(sources={}, accepted_last=accepted, trace=[])
    for _ in range(times):
        count_sources(request, tree, sources, committed)
    return {name: (stats.drafted, stats.accepted) for name, stats in request.sources.items()}


def scored(tokens, parents) -> ScoredTree:
    return ScoredTree(tokens, parents, [1.0] * len(tokens))


CHAIN = scored([9, 1, 2, 3], [-1, 0, 1, 2])
FORK = scored([9, 5, 1, 2, 7], [-1, 0, 0, 2, 2])
WHOLE = DraftTree([9, 1, 2, 3, 5, 7], [-1, 0, 1, 2, 0, 1])
BOTH = [("chain", CHAIN), ("fork", FORK)]


def test_a_node_of_several_sources_counts_for_each():
    assert counted(WHOLE, BOTH, [1, 2, 3, 4], 3) == {"chain": (3, 3), "fork": (4, 2)}
    assert counted(WHOLE, BOTH, [1, 7, 8], 2) == {"chain": (3, 1), "fork": (4, 2)}
    assert counted(WHOLE, BOTH, [5, 8], 1) == {"chain": (3, 0), "fork": (4, 1)}
    assert counted(WHOLE, BOTH, [8], 0) == {"chain": (3, 0), "fork": (4, 0)}


def test_only_nodes_that_were_verified_count():
    cut = DraftTree([9, 1, 7], [-1, 0, 1])
    assert counted(cut, BOTH, [1, 2], 1) == {"chain": (1, 1), "fork": (2, 1)}
    other_place = DraftTree([9, 2, 3], [-1, 0, 1])  # no source has these tokens there
    assert counted(other_place, BOTH, [2, 3, 4], 2) == {"chain": (0, 0), "fork": (0, 0)}


def test_a_bonus_token_that_a_source_drafted_too_is_not_accepted():
    assert counted(WHOLE, BOTH, [1, 2], 1) == {"chain": (3, 1), "fork": (4, 1)}


def test_a_trace_names_every_source_of_an_accepted_node():
    before, last = (CycleTrace((9, 1, 2, 3, 5, 7), (-1, 0, 1, 2, 0, 1), accepted=(1, 2, 3), bonus=4) for _ in range(2))
    request = SimpleNamespace(sources={}, accepted_last=3, trace=[before, last])
    count_sources(request, WHOLE, BOTH, [1, 2, 3, 4])
    assert request.trace[1].sources == (("chain", "fork"), ("chain", "fork"), ("chain",))
    assert request.trace[0] is before


def test_several_trees_of_a_source_are_one():
    assert counted(WHOLE, [("text", CHAIN), ("text", FORK)], [1, 2, 3], 2) == {"text": (5, 2)}


def test_cycles_add_up_and_one_without_nodes_adds_nothing():
    assert counted(WHOLE, BOTH, [1, 2, 3, 4], 3, times=3) == {"chain": (9, 9), "fork": (12, 6)}
    assert counted(DraftTree([9], [-1]), BOTH, [1], 0) == {}
