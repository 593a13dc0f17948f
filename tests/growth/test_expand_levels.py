"""Trees of levels that are known at once, of every shape, against the trees by definition (reference.py)."""

import os
import random

import pytest
import torch

from specengine.draft_trees.rank_paths import RankTree
from specengine.ops.growth import expand_levels as wrapper
from specengine.ops.growth.expand_levels import DepthLimits, LevelShape, expand_levels
from specengine.ops.growth.top_tokens import top_tokens
from specengine.ops.sampling_table import TokenHistory
from tests.growth import reference

CASES = int(os.environ.get("SPECENGINE_GROWTH_CASES", "25"))  # of each shape; fuzzing runs more
CAPE = ([3, 2, 1], [0.3, 0.6])
SHAPES = ("ranks", "backbone", "cape", "ddtree", "jetspec", "top2gap")


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def drawn_logits(draw, rows, vocab):
    """Random logits; some cases with many ties, with masked tokens, or as good as certain."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
    logits = logits * draw.choice((0.3, 1, 3, 8))
    if draw.random() < 0.5:
        logits = logits.round()
    if draw.random() < 0.2:
        logits[:, draw.randrange(vocab) :] = logits[:, :1]
    if draw.random() < 0.2:
        logits[:, 1 : draw.randrange(1, vocab + 1)] = -torch.inf
    for row in range(rows if draw.random() < 0.5 else 0):  # paths of different lengths may be equally likely
        if (drawn := draw.random()) < 0.4:
            logits[row] = torch.where(torch.arange(vocab) == draw.randrange(vocab), 0.0, -torch.inf)
        elif drawn < 0.8:
            logits[row] = 0.0
    return logits


def drawn_ranks(draw, children, levels):
    """A random tree of rank paths that lie level by level."""
    every = reference.paths(children, levels)
    chosen = set()
    for path in draw.sample(every, min(len(every), draw.randrange(1, 9))):
        chosen |= {path[:depth] for depth in range(1, len(path) + 1)}
    return sorted(chosen, key=lambda path: (len(path), draw.random()))


def rank_shape(backend, paths):
    return LevelShape.ranks(RankTree.of(paths), backend.device)


def drawn_shape(backend, kind, draw, vocab, levels):
    """Returns a shape, and the paths of its tree given children and a limit."""
    children = draw.randrange(1, min(vocab, 4) + 1)
    if kind == "ranks":
        paths = drawn_ranks(draw, children, levels)
        return rank_shape(backend, paths), lambda of, limit: [path for path in paths if len(path) <= limit]
    if kind in ("backbone", "cape"):
        widths, thresholds = ([children], []) if kind == "backbone" else ([min(w, vocab) for w in CAPE[0]], CAPE[1])
        shape = LevelShape.backbone(levels, widths, thresholds, backend.device)
        return shape, lambda of, limit: reference.backbone(of, limit, widths, thresholds)
    nodes, beta = draw.randrange(1, 20), draw.choice((0.3, 1.0, 2.5))
    shape = LevelShape.best_first(kind, nodes, children, beta)
    if kind == "ddtree":
        return shape, lambda of, limit: reference.ddtree(of, children, nodes, limit)
    gap = beta if kind == "top2gap" else None
    return shape, lambda of, limit: reference.jetspec(of, children, nodes, limit, gap)


def expected_columns(paths, root, tokens, log_probs, columns):
    """Tokens, parents, depths and scores; tokens, log_probs: of every level."""
    number = {(): 0, **{path: node for node, path in enumerate(paths, 1)}}
    own = [[root, -1, 0, 0.0]]
    for path in paths:
        score = reference.score_of(path, lambda above: log_probs[len(above)])
        own.append([tokens[len(path) - 1][path[-1]], number[path[:-1]], len(path), score])
    return [*own, *([[-1, -1, -1, 0.0]] * (columns - len(own)))]


def grown(backend, shape, logits, known, *, by_request, token_ids=None, limits=None, nodes=None):
    """Columns of the requests, on the CPU. logits: [B, T, Vd]."""
    batch, levels, _ = logits.shape
    rows = (logits if by_request else logits.transpose(0, 1)).flatten(0, 1).contiguous()
    arrived = backend.put(torch.zeros(batch, dtype=torch.int32))
    found = expand_levels(
        *(backend.put(rows), shape, backend.put(ints([[70 + b] for b in range(batch)])), backend.put(known), arrived),
        levels=levels, by_request=by_request, nodes=nodes, token_ids=token_ids, limits=limits,
    )  # fmt: skip
    assert not arrived.any()
    return [each.cpu() for each in found]


def check(backend, kind, seed):
    draw = random.Random(seed)
    batch, levels, vocab = draw.randrange(1, 4), draw.randrange(1, 5), draw.choice((1, 2, 3, 5, 9, 40))
    shape, tree_of = drawn_shape(backend, kind, draw, vocab, levels)
    logits = drawn_logits(draw, batch * levels, vocab).view(batch, levels, vocab)
    limits = [draw.randrange(levels + 2) for _ in range(batch)] if draw.random() < 0.7 else None
    ids = torch.randperm(vocab, dtype=torch.int32) + 100 if draw.random() < 0.5 else None
    known = ints([int(draw.random() < 0.8) for _ in range(batch)])
    logits[known == 0] = torch.nan  # not read
    columns = grown(
        backend, shape, logits, known, by_request=draw.random() < 0.5,
        token_ids=None if ids is None else backend.put(ids),
        limits=None if limits is None else DepthLimits(backend.put(ints(limits))),
    )  # fmt: skip
    for b in range(batch):
        limit = 0 if not known[b] else levels if limits is None else min(limits[b], levels)
        tokens, log_probs = [[]], [[]]
        if limit:
            lists = top_tokens(backend.put(logits[b].contiguous()), shape.children)
            tokens, log_probs = (each.tolist() for each in lists)
        mapped = tokens if ids is None else [[ids[token].item() for token in own] for own in tokens]
        paths = tree_of(lambda above, own=log_probs: own[len(above)], limit) if limit else []
        expected = expected_columns(paths, 70 + b, mapped, log_probs, shape.nodes)
        found = [[column[b, i].item() for column in columns] for i in range(shape.nodes)]
        assert [each[:3] for each in found] == [each[:3] for each in expected], (kind, seed, b)
        scores = [[each[3] for each in rows] for rows in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", SHAPES)
def test_trees_are_those_of_the_definition(backend, kind):
    for seed in range(CASES if backend.name == "cpu" else min(CASES, 400)):
        check(backend, kind, seed)


@pytest.mark.parametrize("kind", ["ddtree", "jetspec", "top2gap"])
def test_the_first_columns_are_the_tree_of_fewer_nodes(backend, kind):
    logits = drawn_logits(random.Random(3), 8, 30).view(2, 4, 30)
    full = grown(backend, LevelShape.best_first(kind, 40, 5), logits, ints([1, 1]), by_request=True)
    for nodes in (1, 2, 7, 33):
        cut = grown(backend, LevelShape.best_first(kind, 40, 5), logits, ints([1, 1]), by_request=True, nodes=nodes)
        for whole, part in zip(full, cut, strict=True):
            assert part.equal(whole[:, :nodes])


@pytest.mark.parametrize("kind, nodes, children", [("ddtree", 256, 255), ("jetspec", 256, 3), ("top2gap", 100, 30)])
def test_large_trees_are_those_of_the_definition(backend, kind, nodes, children):
    """Children whose path is certainly too unlikely are left out of the definition's list."""
    logits = 2 * torch.randn(1, 3, 9000, generator=torch.Generator().manual_seed(4))
    columns = grown(backend, LevelShape.best_first(kind, nodes, children), logits, ints([1]), by_request=True)
    tokens, log_probs = (each.tolist() for each in top_tokens(backend.put(logits[0]), children))
    of = lambda above: log_probs[len(above)]  # noqa: E731
    if kind == "ddtree":
        near = [path for path in reference.paths(40, 2) if sum(path) < 60]
        near += [(a,) for a in range(40, 255)] + [p for p in reference.paths(12, 3) if len(p) == 3]
        paths = sorted(near, key=lambda path: (-reference.score_of(path, of), path))[: nodes - 1]
    else:
        paths = reference.jetspec(of, children, nodes, 3, 1.0 if kind == "top2gap" else None)
    expected = expected_columns(paths, 70, tokens, log_probs, nodes)
    assert [[column[0, i].item() for column in columns[:3]] for i in range(nodes)] == [each[:3] for each in expected]


def test_a_tree_is_no_deeper_than_its_request_may_commit(backend):
    logits = torch.randn(4, 5, 20, generator=torch.Generator().manual_seed(5))
    lengths, ends, active = (backend.put(ints(each)) for each in ([7, 7, 7, 7], [40, 10, 8, 40], [1, 1, 1, 0]))
    texts, one = DepthLimits(None, lengths, ends, active), backend.put(ints([1, 1, 1, 1]))
    for kind in ("ddtree", "jetspec"):
        shape = LevelShape.best_first(kind, 9, 2)
        columns = grown(backend, shape, logits, ints([1, 1, 1, 1]), by_request=False, limits=texts)
        given = DepthLimits(backend.put(ints([5, 2, 0, 0])))
        expected = grown(backend, shape, logits, ints([1, 1, 1, 1]), by_request=False, limits=given)
        for own, other in zip(columns, expected, strict=True):
            assert own.equal(other)
        assert columns[2].amax(1).tolist()[1:] == [2, 0, 0]
        history = TokenHistory(backend.put(torch.arange(70, 110, dtype=torch.int32).view(4, 10)), lengths, lengths)
        arrived, rows = backend.put(ints([0] * 4)), backend.put(logits.transpose(0, 1).flatten(0, 1).contiguous())
        own = expand_levels(
            rows, shape, history, one, arrived, levels=5, by_request=False, limits=DepthLimits(None, None, ends, active)
        )
        assert own[0][:, 0].tolist() == [76, 86, 96, 106]
        assert all(mine.cpu()[:, 1:].equal(other[:, 1:]) for mine, other in zip(own, columns, strict=True))
        assert (columns[2][1] >= 0).sum() == min(9, 7)  # the levels above are as wide as they can be


@pytest.mark.parametrize("vocab", [50, wrapper._C.VOCABULARY_PART + 50])
@pytest.mark.parametrize("tokens, value", [(49, torch.nan), (3, torch.inf), (slice(None), -torch.inf)])
@pytest.mark.parametrize("kind", ["backbone", "jetspec"])
def test_a_request_whose_logits_are_no_distribution_drafts_nothing_on_cuda(cuda_backend, kind, tokens, value, vocab):
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(6))
    shape = LevelShape.backbone(3, [2], (), cuda_backend.device)
    if kind == "jetspec":
        shape = LevelShape.best_first(kind, 7, 2)
    expected = grown(cuda_backend, shape, logits[:1], ints([1]), by_request=True)
    logits[1, 2, tokens] = value
    columns = grown(cuda_backend, shape, logits, ints([1, 1]), by_request=True)
    for own, other in zip(columns, expected, strict=True):
        assert own[0].equal(other[0])
    assert columns[0][1].tolist() == [71] + [-1] * 6 and columns[2][1].tolist() == [0] + [-1] * 6
    lists = top_tokens(cuda_backend.put(logits.flatten(0, 1)), 4)
    assert lists[0][5].tolist() == [-1] * 4 and lists[1][5].tolist() == [0] * 4 and lists[0][:5].min() >= 0


@pytest.mark.usefixtures("instruction_set")
def test_bad_logits_and_shapes_are_refused(monkeypatch):
    class Cpu:
        device, put = torch.device("cpu"), staticmethod(lambda tensor: tensor)

    logits = torch.zeros(2, 3, 9)
    logits[1, 2, 4] = torch.nan
    with pytest.raises(ValueError, match=r"^logits: NaN at \[5, 4\]"):
        grown(Cpu, LevelShape.best_first("ddtree", 4, 2), logits, ints([1, 1]), by_request=True)
    with pytest.raises(ValueError, match=r"^logits: NaN at \[5, 4\]"):
        top_tokens(logits.flatten(0, 1), 2)
    good = torch.zeros(1, 2, 9)

    def refuse(shape, message):
        with pytest.raises(ValueError, match=message):
            grown(Cpu, shape, good, ints([1]), by_request=True)

    ranks = lambda *own: wrapper._C.LevelShape(0, *map(ints, own), None, None, 0.0)  # noqa: E731
    refuse(LevelShape(2, 3, ranks([0, 2], [0, 1], [1, 2])), r"^shape.ranks: entry 1 is 2, expected 0 to 1")
    refuse(LevelShape(2, 3, ranks([0, 1], [0, 2], [1, 2])), r"^shape.parents: entry 1 is 2, expected 0 to 1")
    refuse(LevelShape(2, 3, ranks([0, 1], [0, 1], [1, 1])), r"^shape.depths: entry 1 is 1, expected 2")
    refuse(LevelShape(2, 4, ranks([0, 1], [0, 1], [1, 2])), r"^shape.ranks: expected shape \[N\] with N=3")
    refuse(LevelShape.backbone(2, [2, 1], [0.5, 0.6]), r"^shape.widths: expected shape")
    refuse(LevelShape.backbone(2, [2, 0], [0.5]), r"^widths: entry 1 is 0, expected 1 to 2")
    refuse(LevelShape.best_first("top2gap", 4, 2, 0.0), r"^shape.beta: expected a positive number, got 0")
    refuse(LevelShape.best_first("ddtree", 257, 2), r"^candidates.tokens: 257 columns, expected 1 to 256")
    refuse(LevelShape.best_first("ddtree", 4, 10), r"^parts.tokens: width 10, expected 1 to Vd=9")
    with pytest.raises(ValueError, match=r"^kind: expected one of ddtree, jetspec, top2gap, got 'dtree'"):
        LevelShape.best_first("dtree", 4, 2)


def test_the_likeliest_tokens_are_those_of_torch(backend):
    for vocab, children in ((1, 1), (10, 10), (wrapper._C.VOCABULARY_PART + 700, 20)):
        logits = (3 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))).round()
        tokens, log_probs = top_tokens(backend.put(logits), children)
        order = logits.sort(descending=True, stable=True).indices[:, :children]
        assert tokens.cpu().equal(order.int())
        expected = logits.double().log_softmax(1).gather(1, order).float()
        torch.testing.assert_close(log_probs.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sim
def test_the_order_of_threads_and_blocks_changes_no_bit(cuda_backend):
    logits = (2 * torch.randn(2, 3, 20000, generator=torch.Generator().manual_seed(8))).round()
    results = []
    for seed in range(3):
        wrapper._C.set_schedule(seed)
        results.append(
            grown(cuda_backend, LevelShape.best_first("ddtree", 40, 9), logits, ints([1, 1]), by_request=True)
        )
    for other in results[1:]:
        assert all(own.equal(first) for own, first in zip(other, results[0], strict=True))
