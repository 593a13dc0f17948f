"""Trees whose nodes' children depend on the path, a node opened in every step, against those by definition."""

import os
import random
import zlib

import pytest
import torch

from specengine.draft_trees.shapes import BestFirst
from specengine.ops.growth.best_first_trees import BestFirstTrees
from specengine.ops.growth.expand_levels import BEST_FIRST, DepthLimits
from specengine.ops.growth.growing_trees import Children, GrowthPlan, Logits
from specengine.ops.growth.top_tokens import top_tokens
from tests.backends import Backend
from tests.growth import reference

CASES = int(os.environ.get("SPECENGINE_GROWTH_CASES", "12"))  # of each shape; fuzzing runs more


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


class Network:
    """Logits that depend on the path, and its memory: a row names its path by that of its parent, and its token."""

    def __init__(self, seed, batch, vocab, coarse):
        self.seed, self.vocab, self.coarse = seed, vocab, coarse
        self.memory = [[(b,) for b in range(batch)]]  # of every step

    def logits(self, path):
        draw = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, path)).encode()))
        drawn = torch.randn(self.vocab, generator=draw) * 2
        return drawn.round() if self.coarse else drawn

    def step(self, rows):
        """The paths of rows, () for padding."""
        flat = [path for step in self.memory for path in step]
        paths = [
            (*flat[above], token) if depth >= 0 else ()
            for token, depth, above in zip(
                *(each.tolist() for each in (rows.tokens, rows.depths, rows.above)), strict=True
            )
        ]
        self.memory.append(paths)
        return paths


def check_rows(rows, network, paths):
    """Depths and ancestors of the rows are those of their paths."""
    for b, path in enumerate(paths):
        assert rows.depths[b].item() == len(path) - 1
        steps = [step for step, each in enumerate(network.memory) if path[: len(each[b])] == each[b] != ()]
        bits = sum((word.item() & 0xFFFFFFFF) << 32 * w for w, word in enumerate(rows.ancestors[b]))
        assert bits == (sum(1 << step for step in steps) if path else 0)


def check(backend, kind, seed):
    draw = random.Random(seed)
    batch, levels, vocab = draw.randrange(1, 4), draw.randrange(1, 4), draw.choice((2, 3, 6, 30))
    children, nodes, beta = draw.randrange(1, min(vocab, 3) + 1), draw.randrange(1, 24), draw.choice((0.4, 1.0, 3.0))
    network = Network(seed, batch, vocab, draw.random() < 0.6)
    ids = torch.randperm(vocab, dtype=torch.int32) + 100 if draw.random() < 0.5 else None
    limits = [draw.randrange(levels + 1) for _ in range(batch)] if draw.random() < 0.6 else [levels] * batch
    known = [int(draw.random() < 0.8) for _ in range(batch)]
    sure, shifted = draw.random() < 0.4, draw.random() < 0.4

    put = backend.put
    plan = GrowthPlan.of(BestFirst(kind, levels, nodes, children, beta), batch, backend.device)
    roots, own = put(ints([[70 + b] for b in range(batch)])), None if ids is None else put(ids)
    trees = BestFirstTrees(plan, roots, put(ints(known)), own, limits=DepthLimits(put(ints(limits))))
    paths, steps = network.memory[0], 0
    while True:
        logits = torch.stack([network.logits(path) if path else torch.full((vocab,), torch.nan) for path in paths])
        delta = torch.ones(batch, vocab) if shifted else None
        confidence = torch.tensor([0.3 * len(path) - 1 for path in paths]) if sure else None
        given = (logits if delta is None else logits - 1, delta, confidence)
        rows = trees.add(Logits(*(None if each is None else put(each) for each in given)))
        steps += 1
        assert not plan.arrived.any()
        if rows is None:
            break
        paths = network.step(rows)
        check_rows(rows, network, paths)
    opened = max(1, -(-(nodes - 1) // children) if kind == "jetspec" else nodes - 1)
    assert steps <= opened if backend.name == "cpu" else steps == opened
    columns = [column.cpu() for column in trees.columns]
    for b in range(batch):
        limit = limits[b] if known[b] else 0
        expected = expected_columns(backend, network, kind, b, children, nodes, limit, beta, ids, sure, shifted)
        found = [[column[b, i].item() for column in columns] for i in range(nodes)]
        assert [each[:3] for each in found] == [each[:3] for each in expected], (kind, seed, b)
        scores = [[each[3] for each in rows] for rows in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-4, abs=1e-5), (kind, seed, b)


def expected_columns(backend, network, kind, b, children, nodes, limit, beta, ids, sure, shifted):
    """Tokens, parents, depths and scores of the tree by definition."""
    lists = {}

    def list_of(ranks):
        """Tokens and log-probabilities of the children of a node."""
        if ranks not in lists:
            logits = network.logits(named(ranks))[None]
            found = top_tokens(backend.put((logits - 1) + 1 if shifted else logits), children)
            tokens = found[0] if ids is None else ids[found[0].cpu().long()]
            lists[ranks] = tokens[0].tolist(), found[1][0].tolist()
        return lists[ranks]

    def named(ranks):
        return (b, *(list_of(ranks[:depth])[0][rank] for depth, rank in enumerate(ranks)))

    def score(ranks):
        if not sure:
            return reference.score_of(ranks, lambda above: list_of(above)[1])
        total = 0.0
        for depth, rank in enumerate(ranks):
            log_probs = torch.tensor([list_of(ranks[:depth])[1]])
            chance = torch.tensor([0.3 * (1 + depth) - 1]).sigmoid()
            total += reference.confident(log_probs, chance)[0, rank].item()
        return total

    of = lambda above: list_of(above)[1]  # noqa: E731
    if kind == "ddtree":
        paths = reference.ddtree(of, children, nodes, limit)
    else:
        paths = reference.jetspec(of, children, nodes, limit, beta if kind == "top2gap" else None)
    number = {(): 0, **{path: node for node, path in enumerate(paths, 1)}}
    own = [[70 + b, -1, 0, 0.0]]
    own += [[list_of(p[:-1])[0][p[-1]], number[p[:-1]], len(p), score(p)] for p in paths]
    return [*own, *([[-1, -1, -1, 0.0]] * (nodes - len(own)))]


def trees_of(backend, shape, batch=1, ids=None):
    one = backend.put(ints([1] * batch))
    return BestFirstTrees(GrowthPlan.of(shape, batch, backend.device), one[:, None].contiguous(), one, ids)


@pytest.mark.parametrize("kind", BEST_FIRST)
def test_trees_are_those_of_the_definition(backend, kind):
    for seed in range(CASES if backend.name == "cpu" else min(CASES, 100)):
        check(backend, kind, seed)


def test_large_vocabularies_and_many_steps(backend):
    trees, network = trees_of(backend, BestFirst("ddtree", 6, 60, 20)), Network(3, 1, 9000, False)
    paths = network.memory[0]
    while (rows := trees.add(Logits(backend.put(torch.stack([network.logits(path) for path in paths]))))) is not None:
        paths = network.step(rows)
        check_rows(rows, network, paths)
    tokens, parents, depths, scores = (column[0].tolist() for column in trees.columns)
    assert min(depths) == 0 and sorted(scores, reverse=True) == scores
    assert len({*zip(parents, tokens, strict=True)}) == 60


@pytest.mark.parametrize("kind", BEST_FIRST)
def test_children_that_a_network_knows_grow_the_trees_of_their_distributions(backend, kind):
    network, put = Network(5, 2, 12, False), backend.put
    ids = put(torch.randperm(12, dtype=torch.int32) + 100)
    trees = [trees_of(backend, BestFirst(kind, 3, 12, 3), 2, ids) for _ in range(2)]
    paths = network.memory[0]
    while True:
        logits = torch.full((2, 12), -torch.inf)
        best = torch.stack([network.logits(path) for path in paths]).topk(5)
        logits = logits.scatter(1, best.indices, best.values)
        known = Children(put(best.indices.int()), put(best.values.log_softmax(-1)))
        ours, theirs = trees[0].add(known), trees[1].add(Logits(put(logits)))
        assert (ours is None) == (theirs is None)
        if ours is None:
            break
        assert ours.above.equal(theirs.above)
        paths = network.step(ours)
    for own, other in zip(trees[0].columns[:3], trees[1].columns[:3], strict=True):
        assert own.equal(other)
    torch.testing.assert_close(trees[0].columns[3], trees[1].columns[3])


def test_a_node_without_a_distribution_has_no_children_on_cuda(cuda_backend):
    put, trees = cuda_backend.put, trees_of(cuda_backend, BestFirst("jetspec", 3, 7, 2), 2)
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    rows = trees.add(Logits(put(logits)))
    assert rows.tokens.tolist() == [0, 0]
    bad = logits.clone()
    bad[1, 2] = torch.nan
    rows = trees.add(Logits(put(bad)))
    assert rows.tokens.tolist() == [0, 1]  # the best node left
    trees.add(Logits(put(logits)))
    parents, depths = (trees.columns[column].tolist() for column in (1, 2))
    assert parents[1] == [-1, 0, 0, 2, 2, -1, -1] and depths[1] == [0, 1, 1, 2, 2, -1, -1]


@pytest.mark.usefixtures("instruction_set")
def test_bad_logits_and_sizes_are_refused():
    def refuse(message, logits, confidence=None, shape=("ddtree", 3, 5, 2)):
        with pytest.raises(ValueError, match=message):
            trees_of(Backend("cpu", torch.device("cpu")), BestFirst(*shape)).add(Logits(logits, None, confidence))

    refuse(r"^logits: NaN at \[0, 2\]", torch.tensor([[0.0, 1.0, torch.nan]]))
    refuse(r"^parts.tokens: width 2, expected 1 to Vd=1", torch.zeros(1, 1))
    refuse(r"^confidence: expected shape \[B\] with B=1", torch.zeros(1, 3), torch.zeros(2))
    refuse(r"^levels: expected 1 or more, got 0", torch.zeros(1, 3), shape=("ddtree", 0, 5, 2))
    refuse(r"^shape.beta: expected a positive number, got 0", torch.zeros(1, 3), shape=("top2gap", 3, 5, 2, 0.0))
