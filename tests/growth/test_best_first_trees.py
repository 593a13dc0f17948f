"""Trees whose nodes' children depend on the path, a node opened in every step, against those by definition."""

import os
import random
import zlib
from dataclasses import replace

import pytest
import torch

from specengine.draft_trees.shapes import BestFirst
from specengine.ops.growth.best_first_trees import BestFirstTrees
from specengine.ops.growth.expand_levels import BEST_FIRST, DepthLimits, expand_levels
from specengine.ops.growth.growing_trees import Children, Logits
from specengine.ops.growth.growth_plan import GrowthPlan
from specengine.ops.growth.top_tokens import top_tokens
from tests.growth import reference

CASES = int(os.environ.get("SPECENGINE_GROWTH_CASES", "24"))  # of each shape; fuzzing runs more


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


class Lists:
    """The children of the nodes of a request, by their ranks: tokens and log-probabilities."""

    def __init__(self, backend, network, request, ids, children, *, given, sure):
        self.backend, self.network, self.request, self.ids = backend, network, request, ids
        self.children, self.given, self.sure, self.found = children, given, sure, {}

    def of(self, ranks):
        if ranks not in self.found:
            path = (self.request, *(self.of(ranks[:depth])[0][rank] for depth, rank in enumerate(ranks)))
            tokens, scores = found_of(self.backend, self.network.logits(path)[None], self.given or self.children)
            if self.given:
                kept, scores = top_tokens(self.backend.put(scores), self.children)
                tokens = tokens.gather(1, kept.cpu().long())
            tokens = tokens if self.ids is None else self.ids[tokens.long()]
            self.found[ranks] = tokens[0].tolist(), scores[0].tolist()
        return self.found[ranks]

    def score(self, ranks):
        if not self.sure:
            return reference.score_of(ranks, lambda above: self.of(above)[1])
        total = 0.0
        for depth, rank in enumerate(ranks):
            log_probs, sure = torch.tensor([self.of(ranks[:depth])[1]]), torch.tensor([sure_of(ranks[:depth])])
            total += reference.confident(log_probs, sure.sigmoid())[0, rank].item()
        return total

    def columns(self, paths, nodes):
        """Tokens, parents, depths and scores of the tree of some paths."""
        number = {(): 0, **{path: node for node, path in enumerate(paths, 1)}}
        own = [[70 + self.request, -1, 0, 0.0]]
        own += [[self.of(p[:-1])[0][p[-1]], number[p[:-1]], len(p), self.score(p)] for p in paths]
        return [*own, *([[-1, -1, -1, 0.0]] * (nodes - len(own)))]


def sure_of(path):
    return 0.3 * len(path) - 0.7


def found_of(backend, logits, count):
    return [each.cpu() for each in top_tokens(backend.put(logits), count)]


def steps_of(kind, nodes, children):
    """How often a network is asked at most."""
    return max(1, -(-(nodes - 1) // children) if kind == "jetspec" else nodes - 1)


def check(backend, kind, seed):
    draw, put = random.Random(seed), backend.put
    batch, levels, vocab = draw.randrange(1, 4), draw.randrange(1, 4), draw.choice((2, 3, 6, 30))
    children, nodes, beta = draw.randrange(1, min(vocab, 3) + 1), draw.randrange(1, 24), draw.choice((0.4, 1.0, 3.0))
    network = Network(seed, batch, vocab, draw.random() < 0.6)
    ids = torch.randperm(vocab, dtype=torch.int32) + 100 if draw.random() < 0.5 else None
    limits = [draw.randrange(levels + 1) for _ in range(batch)] if draw.random() < 0.6 else [levels] * batch
    known = [int(draw.random() < 0.8) for _ in range(batch)]
    given = draw.randrange(children, vocab + 1) if draw.random() < 0.3 else 0  # children, in place of logits
    sure, shifted = not given and draw.random() < 0.4, draw.random() < 0.4
    plan = GrowthPlan.of(BestFirst(kind, levels, nodes + draw.randrange(3), children, beta), batch, backend.device)
    place = put(ints([[70 + b] for b in range(batch)])), put(ints(known)), None if ids is None else put(ids)
    trees = BestFirstTrees(plan, *place, limits=DepthLimits(put(ints(limits))), nodes=nodes)
    paths, steps, rows = network.memory[0], 0, True
    while rows is not None:
        values = torch.stack([network.logits(path) if path else torch.zeros(vocab) for path in paths])
        found = Children(*map(put, found_of(backend, values, given))) if given else None
        if not given:
            values[[not path for path in paths]] = torch.nan  # not read
            delta = put(torch.ones(batch, vocab)) if shifted else None
            confidence = put(torch.tensor([sure_of(path[1:]) for path in paths])) if sure else None
            found = Logits(put(values - 1 if shifted else values), delta, confidence)
        rows, steps = trees.add(found), steps + 1
        assert not plan.arrived.any()
        if rows is not None:
            paths = network.step(rows)
            check_rows(rows, network, paths)
            assert backend.name != "cpu" or any(paths)
    most = steps_of(kind, nodes, children)
    assert steps == most or (steps < most and (backend.name == "cpu" or levels == 1))
    columns = [column.cpu() for column in trees.columns]
    for b in range(batch):
        lists, limit = Lists(backend, network, b, ids, children, given=given, sure=sure), limits[b] if known[b] else 0
        if kind == "ddtree":
            expected = reference.ddtree(lambda above, lists=lists: lists.of(above)[1], children, nodes, limit)
        else:
            gap = beta if kind == "top2gap" else None
            expected = reference.jetspec(lambda above, lists=lists: lists.of(above)[1], children, nodes, limit, gap)
        expected = lists.columns(expected, nodes)
        found = [[column[b, i].item() for column in columns] for i in range(nodes)]
        assert [each[:3] for each in found] == [each[:3] for each in expected], (kind, seed, b)
        scores = [[each[3] for each in rows] for rows in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-4, abs=1e-5), (kind, seed, b)


@pytest.mark.parametrize("kind", BEST_FIRST)
def test_trees_are_those_of_the_definition(backend, kind):
    for seed in range(CASES if backend.name == "cpu" else min(CASES, 100)):
        check(backend, kind, seed)


def trees_of(backend, shape, batch=1):
    one = backend.put(torch.ones(batch, 1, dtype=torch.int32))
    return BestFirstTrees(GrowthPlan.of(shape, batch, backend.device), one, one.flatten(), None)


@pytest.mark.parametrize("kind", BEST_FIRST)
def test_trees_whose_levels_are_known_at_once_grow_whole(backend, kind):
    put, shape = backend.put, BestFirst(kind, 4, 20, 3)
    plan, logits = GrowthPlan.of(shape, 2, backend.device), put(Network(1, 2, 4 * 30, False).logits(()).view(4, 30))
    place = put(ints([[70], [71]])), put(ints([1, 1]))
    settings = {"limits": DepthLimits(put(ints([1, 2]))), "nodes": 12, "token_ids": put(torch.arange(30).int() + 100)}
    trees = BestFirstTrees(plan, *place, **settings)
    assert trees.add(Logits(logits.repeat(2, 1), levels=4)) is None
    arguments = logits.repeat(2, 1), plan.level_shape, *place, plan.arrived
    expected = expand_levels(*arguments, levels=4, by_request=True, **settings)
    assert all(own.equal(other) for own, other in zip(trees.columns, expected, strict=True))
    assert expected[2].amax(1).tolist() == [1, 2] and expected[2].shape == (2, 12)


def test_large_vocabularies_and_many_steps(backend):
    trees, network = trees_of(backend, BestFirst("ddtree", 6, 60, 20)), Network(3, 1, 9000, False)
    paths = network.memory[0]
    while (rows := trees.add(Logits(backend.put(torch.stack([network.logits(path) for path in paths]))))) is not None:
        paths = network.step(rows)
        check_rows(rows, network, paths)
    tokens, parents, depths, scores = (column[0].tolist() for column in trees.columns)
    assert min(depths) == 0 and sorted(scores, reverse=True) == scores
    assert len({*zip(parents, tokens, strict=True)}) == 60


def test_a_node_without_a_distribution_has_no_children_on_cuda(cuda_backend):
    trees, logits = trees_of(cuda_backend, BestFirst("jetspec", 3, 7, 2), 2), torch.tensor([[2.0, 1.0, 0.0]] * 2)
    assert trees.add(Logits(cuda_backend.put(logits))).tokens.tolist() == [0, 0]
    bad = logits.clone()
    bad[1, 2] = torch.nan
    assert trees.add(Logits(cuda_backend.put(bad))).tokens.tolist() == [0, 1]  # the best node left
    trees.add(Logits(cuda_backend.put(logits)))
    parents, depths = (trees.columns[column].tolist() for column in (1, 2))
    assert parents[1] == [-1, 0, 0, 2, 2, -1, -1] and depths[1] == [0, 1, 1, 2, 2, -1, -1]


@pytest.mark.usefixtures("instruction_set")
def test_bad_logits_and_sizes_are_refused():
    class Cpu:
        device, put = torch.device("cpu"), staticmethod(lambda tensor: tensor)

    def refuse(message, logits, confidence=None, **changes):
        shape = replace(BestFirst("ddtree", 3, 5, 2), **changes)
        with pytest.raises(ValueError, match=message):
            trees_of(Cpu, shape).add(Logits(logits, None, confidence))

    refuse(r"^logits: NaN at \[0, 2\]", torch.tensor([[0.0, 1.0, torch.nan]]))
    refuse(r"^parts.tokens: width 2, expected 1 to Vd=1", torch.zeros(1, 1))
    refuse(r"^confidence: expected shape \[B\] with B=1", torch.zeros(1, 3), torch.zeros(2))
    refuse(r"^levels: expected 1 or more, got 0", torch.zeros(1, 3), levels=0)
    refuse(r"^shape.beta: expected a positive number, got 0", torch.zeros(1, 3), kind="top2gap", beta=0.0)
    refuse(r"^kind: expected one of ddtree, jetspec, top2gap, got 'ranks'", torch.zeros(1, 3), kind="ranks")
