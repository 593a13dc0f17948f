"""The dynamic tree against a construction node by node."""

import random

import pytest
import torch

from specengine.draft_trees.dynamic import DynamicTrees
from specengine.draft_trees.tree import DraftTree
from specengine.ops.select_nodes import SelectedTrees, select_nodes


def children_of(path, top_k, coarse):
    """The likeliest children of a node, a function of its path: tokens and log-probabilities, falling."""
    draw = random.Random(repr(path))
    # with steps of a half many sums are equal, and a probability of one makes a child as good as its parent
    scores = sorted((draw.choice((0.0, 0.0, -0.5, -1.0)) if coarse else -draw.expovariate(1)) for _ in range(top_k))
    return list(zip(draw.sample(range(1000), top_k), scores[::-1], strict=True))


def brute_force(seed, levels, top_k, width, count, coarse, limit):
    """The tree of one request as its paper has it: {path: cumulative score}."""
    nodes, beam = {}, [((seed,), 0.0)]
    for _ in range(min(levels, limit)):
        level = []
        for path, score in beam:
            for token, own in children_of(path, top_k, coarse):
                level.append(((*path, token), score + own))
        nodes |= dict(level)
        beam = sorted(level, key=lambda each: -each[1])[:width]  # stable: of equal ones the first
    best = sorted(nodes.items(), key=lambda each: (-each[1], len(each[0])))  # of equal ones the shallow, then the first
    return dict(best[:count])


def grown(seeds, levels, top_k, width, coarse):
    trees, beam, paths = None, None, [[(seed,)] for seed in seeds]
    for _ in range(levels):
        drawn = [[children_of(path, top_k, coarse) for path in own] for own in paths]
        tokens = torch.tensor([[[t for t, _ in node] for node in own] for own in drawn], dtype=torch.int32)
        scores = torch.tensor([[[s for _, s in node] for node in own] for own in drawn])
        if trees is None:
            trees = DynamicTrees(tokens[:, 0], scores[:, 0], width)
            first = 1
        else:
            above = trees.grow(tokens, scores)
            first = 1 + trees.ends[-2]
        candidates = trees.rooted(torch.tensor(seeds, dtype=torch.int32)[:, None])
        nodes = first + trees.beam
        if beam is not None:
            assert candidates[1].gather(1, nodes).equal(beam.gather(1, above).int())
        assert candidates[0].gather(1, nodes).equal(trees.opened)
        beam = nodes
        paths = [[path_of(candidates, b, node) for node in own] for b, own in enumerate(beam.tolist())]
        paths = [[(seed, *path) for path in own] for seed, own in zip(seeds, paths, strict=True)]
    return trees


def path_of(candidates, b, node):
    """From below the root, which is candidate 0."""
    tokens, parents, *_ = candidates
    path = []
    while node > 0:
        path.append(tokens[b, node].item())
        node = parents[b, node].item()
    return tuple(path[::-1])


@pytest.mark.parametrize("coarse", [False, True], ids=["all different", "many equal"])
def test_the_tree_is_that_of_a_construction_node_by_node(coarse):
    draw = random.Random(coarse)
    for case in range(500):
        levels, top_k, batch = draw.randint(1, 5), draw.randint(1, 5), 2
        width = draw.choice((1, top_k, draw.randint(1, top_k)))
        seeds, limits = [2 * case, 2 * case + 1], [draw.randint(1, 6) for _ in range(batch)]
        trees = grown(seeds, levels, top_k, width, coarse)
        count = draw.randint(1, trees.ends[-1] + 3)
        candidates = trees.rooted(torch.tensor(seeds, dtype=torch.int32)[:, None])
        chosen = SelectedTrees.empty(batch, 1 + count)
        select_nodes(*candidates, torch.tensor(limits, dtype=torch.int32), chosen)
        for b, seed in enumerate(seeds):
            kept = chosen.kept[b][: chosen.node_counts[b]].long()
            tree = DraftTree(*(column[b][: len(kept)].tolist() for column in (chosen.tokens, chosen.parents)))
            ours, paths = {}, [(seed,)]
            for token, parent, score in zip(tree.tokens[1:], tree.parents[1:], candidates[3][b][kept[1:]], strict=True):
                paths.append((*paths[parent], token))
                ours[paths[-1]] = score.item()
            expected = brute_force(seed, levels, top_k, width, count, coarse, limits[b])
            assert ours == pytest.approx(expected, abs=1e-5)


def test_equal_scores_leave_no_node_without_its_parent():
    """All candidates are equally good: every count must give a tree, shallow nodes first."""
    tokens = torch.arange(3, dtype=torch.int32)[None]
    trees = DynamicTrees(tokens, torch.zeros(1, 3), 3)
    for _ in range(2):
        trees.grow(tokens.expand(1, 3, 3), torch.zeros(1, 3, 3))
    candidates = trees.rooted(torch.zeros(1, 1, dtype=torch.int32))
    for count in range(1, 22):
        chosen = select_nodes(*candidates, torch.tensor([3], dtype=torch.int32), SelectedTrees.empty(1, 1 + count))
        assert chosen.kept[0].tolist() == [*range(1 + count)]
        DraftTree(chosen.tokens[0].tolist(), chosen.parents[0].tolist())
