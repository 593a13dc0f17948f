"""Trees that grow level by level, and whole, against those by definition (reference.py)."""

import os
import random
from types import SimpleNamespace

import pytest
import torch

from specengine import SamplingParams
from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.shapes import Beam, Ranks
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.drawn_trees import DrawnTrees, Sampling
from specengine.drafters.growth import grow, scored_trees
from specengine.ops.growth import growing_trees
from specengine.ops.growth.expand_levels import DepthLimits
from specengine.ops.growth.growing_trees import Children, GrowingTrees, Logits
from specengine.ops.growth.growth_plan import GrowthPlan
from specengine.ops.growth.top_tokens import top_tokens
from tests.growth import reference

CASES = int(os.environ.get("SPECENGINE_GROWTH_CASES", "25"))  # of each shape; fuzzing runs more
CAPE = {"widths": (4, 2, 1), "thresholds": (0.3, 0.6)}


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def drawn_shape(draw, kind, levels, vocab):
    """A shape, and its rank paths if they are given; `cape` is one of either kind."""
    settings = CAPE if kind == "cape" else {}
    if kind == "ranks" or (kind == "cape" and draw.random() < 0.5):
        every = reference.paths(min(vocab, 3), levels)
        leaves = [*draw.sample(every, min(len(every), draw.randrange(1, 8))), (0,) * levels]
        paths = {leaf[:depth] for leaf in leaves for depth in range(1, len(leaf) + 1)}
        return Ranks(RankTree.of(sorted(paths, key=lambda path: (len(path), path))), **settings), paths
    children = 4 if settings else draw.randrange(1, min(vocab, 5) + 1)
    return Beam(levels, children, draw.randrange(1, children + 1), **settings), None


class Drafts:
    """Random children of the rows of every level, as a network gives them and as lists for the definition."""

    def __init__(self, backend, draw, shape, vocab, known):
        self.backend, self.draw, self.shape, self.vocab, self.known = backend, draw, shape, vocab, known
        self.seeds = torch.Generator().manual_seed(draw.randrange(1 << 30))
        self.coarse = draw.random() < 0.5

    def random(self, *size):
        drawn = 2 * torch.randn(size, generator=self.seeds)
        return drawn.round() if self.coarse else drawn

    def children(self, rows):
        """Of `rows` rows of each request, which may share them; some do not exist, and there may be too many."""
        size = len(self.known) * self.draw.choice((1, rows)), self.shape.children + self.draw.randrange(3)
        tokens = torch.randint(-1, self.vocab, size, generator=self.seeds, dtype=torch.int32)
        scores = (-self.random(*size).abs()).sort(descending=True).values
        found = Children(self.backend.put(tokens), self.backend.put(scores))
        return found, self._lists(self._each(tokens, rows).tolist(), self._each(scores, rows).tolist())

    def logits(self, rows, last, plain=False):
        """Which rows of a request may share, to which each may add its own, and some with a confidence."""
        some = [not plain and self.draw.random() < 0.4 for _ in range(3)]
        values = self.random(len(self.known) * (1 if some[0] else rows), self.vocab)
        delta = self.random(len(self.known) * rows, self.vocab) if some[1] else None
        sure = self.random(len(self.known) * self.draw.choice((1, rows))) if some[2] and last else None
        summed = self._each(values, rows) + (0 if delta is None else delta)
        tokens, scores = (each.tolist() for each in top_tokens(self.backend.put(summed), self.shape.children))
        if sure is not None:  # after the last level, where its rounding chooses no node
            scores = reference.confident(torch.tensor(scores), self._each(sure, rows).sigmoid()).tolist()
        values.view(len(self.known), -1)[self.known == 0] = torch.nan  # not read
        given = (each if each is None else self.backend.put(each) for each in (values, delta, sure))
        return Logits(*given), self._lists(tokens, scores)

    def _each(self, own, rows):
        """Of each row, what the rows of a request may share."""
        return own.repeat_interleave(len(self.known) * rows // len(own), 0)

    def _lists(self, tokens, scores):
        """[B][rows] lists of token and log-probability; a child past CAPE's width does not exist."""
        lists = [[*zip(*own, strict=True)][: self.shape.children] for own in zip(tokens, scores, strict=True)]
        for own in lists if self.shape.widths else ():
            width = reference.width_of(own[0][1], self.shape.widths, self.shape.thresholds)
            own[width:] = [(-1, -torch.inf)] * (len(own) - width)
        rows = len(lists) // len(self.known)
        return [lists[b * rows : (b + 1) * rows] for b in range(len(self.known))]


def begun(backend, draw, shape, paths, batch, vocab):
    """Trees of the ops and of the definition, and the tokens that the drafter's are."""
    known = ints([int(draw.random() < 0.8) for _ in range(batch)])
    ids = torch.randperm(vocab, dtype=torch.int32, generator=torch.Generator().manual_seed(1)) + 100
    ids = ids if draw.random() < 0.5 else None
    plan = GrowthPlan.of(shape, batch, backend.device)
    wanted = [reference.Tree(70 + b, bool(known[b]), getattr(shape, "width", 0), paths) for b in range(batch)]
    place = (backend.put(ints([[70 + b] for b in range(batch)])), backend.put(known))
    return plan, place, None if ids is None else backend.put(ids), wanted, known


def mapped(lists, ids):
    return [[[(t if ids is None or t < 0 else ids[t].item(), s) for t, s in own] for own in rows] for rows in lists]


def rows_of(columns, b, count):
    return [tuple(column[b, i].item() for column in columns) for i in range(count)]


def check_columns(found, wanted):
    """The same nodes in the same columns; those that do not exist have no meaning."""
    found, wanted = ([each if each[2] >= 0 else None for each in columns] for columns in (found, wanted))
    assert [each and each[:3] for each in found] == [each and each[:3] for each in wanted]
    scores = [[each[3] for each in columns if each] for columns in (found, wanted)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4, abs=1e-4)


def check_rows(rows, wanted, above, backend):
    """The rows of the opened nodes: padding where they do not exist, but on the CPU, which takes none, token 0."""
    width, fills = rows.beam.shape[1], backend.name == "cpu"
    assert rows.row_start.tolist() == [*range(0, len(wanted) * width + 1, width)]
    assert rows.first_node == wanted[0].count - width
    columns = rows.tokens.tolist(), rows.depths.tolist(), rows.beam.flatten().tolist(), rows.above.tolist()
    own = zip(*columns, rows.ancestors.tolist(), above, strict=True)
    for tree in wanted:
        for column, bits in zip(tree.opened, tree.bits, strict=True):
            *node, found, continued, words, expected = next(own)
            exists = tree.columns[column][2] >= 0
            no_row = [0, 0] if fills else [-1, -1]
            assert node == ([tree.columns[column][0], tree.columns[column][2]] if exists else no_row)
            if tree.known:  # nothing else chooses among its nodes
                assert (found, continued) == (column, expected)
                mask = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(words))
                assert mask == (bits if exists or fills else 0)


def check(backend, kind, seed, shape=None):
    draw = random.Random(seed)
    batch, levels, vocab = draw.randrange(1, 4), draw.randrange(2, 5), draw.choice((4, 5, 9, 40))
    shape, paths = (shape, None) if shape else drawn_shape(draw, kind, levels, vocab)
    levels = shape.levels
    plan, place, ids, wanted, known = begun(backend, draw, shape, paths, batch, vocab)
    origin = [draw.randrange(20) for _ in range(batch)] if draw.random() < 0.3 else None
    trees = GrowingTrees(plan, *place, ids, origin=None if origin is None else backend.put(torch.tensor(origin)))
    drafts = Drafts(backend, draw, shape, vocab, known)
    for level in range(levels):
        last, count = level == levels - 1, len(wanted[0].opened)
        given = kind != "cape" and draw.random() < 0.4
        found, lists = drafts.children(count) if given else drafts.logits(count, last)
        rows = trees.add(found)
        parents = [tree.add(own, last) for tree, own in zip(wanted, mapped(lists, ids), strict=True)]
        exists = any(tree.columns[column][2] >= 0 for tree in wanted for column in tree.opened)
        assert (rows is None) == (last or (backend.name == "cpu" and not exists)) and not plan.arrived.any()
        for b, tree in enumerate(wanted):
            assert trees.columns[0].shape == (batch, len(tree.columns)), (kind, seed)
            check_columns(rows_of(trees.columns, b, len(tree.columns)), tree.columns)
        if rows is None:
            break
        first = origin if origin and level == 0 else [count * b for b in range(batch)]
        check_rows(rows, wanted, [first[b] + row for b, own in enumerate(parents) for row in own], backend)
        assert rows.in_place == (count == rows.beam.shape[1] == 1 and first is not origin)


@pytest.mark.parametrize("kind", ["beam", "ranks", "cape"])
def test_every_level_has_the_candidates_and_rows_of_the_definition(backend, kind):
    for seed in range(CASES if backend.name == "cpu" else min(CASES, 400)):
        check(backend, kind, seed)


def test_ancestors_take_several_words(backend):
    check(backend, "beam", 8, Beam(12, 4, 4))


@pytest.mark.parametrize("kind", ["beam", "ranks", "cape"])
def test_levels_that_are_known_at_once_give_the_trees_of_the_definition(backend, kind):
    for seed in range(8):
        draw = random.Random(seed)
        batch, levels, by_request = draw.randrange(1, 4), draw.randrange(1, 5), draw.random() < 0.5
        shape, paths = drawn_shape(draw, kind, levels, 30)
        plan, place, ids, wanted, known = begun(backend, draw, shape, paths, batch, 30)
        limits = [draw.randrange(levels + 1) for _ in range(batch)]
        trees = GrowingTrees(plan, *place, ids, limits=DepthLimits(backend.put(ints(limits))))
        drafts = Drafts(backend, draw, shape, 30, known)
        logits, lists = zip(*(drafts.logits(1, last=False, plain=True) for _ in range(levels)), strict=True)
        values = torch.stack([each.values for each in logits], int(by_request)).flatten(0, 1)
        assert trees.add(Logits(values.contiguous(), levels=levels, by_request=by_request)) is None
        for b, tree in enumerate(wanted):
            for level, each in enumerate(lists):
                tree.add(mapped(each, ids)[b] * len(tree.opened), level == levels - 1)
            found = reference.nodes_of(rows_of(trees.columns, b, trees.columns[0].shape[1]))
            limit = limits[b] if plan.level_shape else levels  # others are cut when they are selected
            assert found == pytest.approx(reference.nodes_of(tree.columns, limit), rel=1e-5, abs=1e-5), (kind, seed)


def one_tree(backend, shape, batch=1):
    one = backend.put(torch.ones(batch, 1, dtype=torch.int32))
    return GrowingTrees(GrowthPlan.of(shape, batch, backend.device), one, one.flatten(), None)


def test_nan_among_the_scores_leaves_every_row_of_the_beam_a_place(backend):
    scores = backend.put(torch.tensor([[torch.nan, -1.0, torch.nan, -2.0]]))
    trees = one_tree(backend, Beam(3, 4, 3))
    for tokens in (ints([[4, 5, 6, 7]]), ints([[8, 9, 10, 11]] * 3)):
        rows = trees.add(Children(backend.put(tokens), scores.repeat(len(tokens), 1)))
        assert rows is not None and len({*rows.beam.flatten().tolist()}) == 3


def test_a_row_without_a_distribution_is_refused_or_has_no_children(backend):
    trees, logits = one_tree(backend, Beam(2, 2, 2)), torch.randn(2, 60, generator=torch.Generator().manual_seed(1))
    trees.add(Logits(backend.put(logits[:1])))
    logits[1, 7] = torch.nan
    if backend.name == "cpu":
        with pytest.raises(ValueError, match=r"^logits: NaN at \[1, 7\]"):
            trees.add(Logits(logits))
    else:
        trees.add(Logits(backend.put(logits)))
        assert trees.columns[2].tolist() == [[0, 1, 1, 2, 2, -1, -1]]


@pytest.mark.parametrize("vocab", [9000, 30000])
def test_a_level_does_not_depend_on_the_order_of_its_blocks(backend, vocab):
    logits = backend.put((3 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(2))).round())
    for schedule in range(3):
        if backend.name == "sim":
            growing_trees._C.set_schedule(schedule)
        trees = one_tree(backend, Beam(2, 2, 2), batch=2)
        trees.add(Logits(logits[:2]))
        trees.add(Logits(logits))
        found = top_tokens(logits, 2)
        assert trees.columns[0][:, 3:].flatten().equal(found[0].flatten())
        above = trees.columns[3].gather(1, trees.columns[1][:, 3:].long())
        assert trees.columns[3][:, 3:].equal(above + found[1].view(2, -1))


def test_sizes_that_do_not_fit_are_refused(backend):
    put = backend.put

    def refuse(message, found):
        with pytest.raises(ValueError, match=message):
            one_tree(backend, Beam(2, 2, 2), batch=2).add(found)

    refuse(r"^after.beam: 2 rows of 1 candidates", Children(put(ints([[1], [2]])), put(torch.zeros(2, 1))))
    refuse(r"^logits: expected 2 rows or 2, got 3", Logits(put(torch.zeros(3, 9))))
    refuse(r"^parts.tokens: width 2, expected 1 to Vd=1", Logits(put(torch.zeros(2, 1))))
    refuse(r"^parts.tokens: expected .* \(from delta\)", Logits(put(torch.zeros(2, 9)), put(torch.zeros(1, 9))))
    refuse(r"^confidence: expected 2 entries or 2, got 3", Logits(put(torch.zeros(2, 9)), None, put(torch.zeros(3))))


def test_a_level_is_grown_if_it_is_expected_to_pay(backend):
    """Of two requests that are reached with chance 1/2 and 1/4 after one level, the next adds their squares."""
    chances = torch.tensor([[0.5], [0.25]])

    def network():
        while True:
            yield Children(backend.put(ints([[3], [4]])), backend.put(chances.log()))

    for min_gain, levels in ((0.0, 3), (0.312, 2), (0.313, 1)):
        trees = one_tree(backend, Beam(3, 1), batch=2)
        assert grow(network(), trees, min_gain) == levels
        found = scored_trees(trees.columns, backend.put(ints([3, 3])), 4)
        assert [tree.tokens for tree in found] == [[1] + [token] * levels for token in (3, 4)]
        assert [tree.chances for tree in found] == [[1.0] + [pytest.approx(p.item())] * levels for p in chances]


@pytest.mark.parametrize("sure", [False, True])
def test_drawn_children_are_as_many_as_the_shape_allows_and_their_logits_are_kept(backend, sure):
    put, draws = backend.put, torch.Generator().manual_seed(4)
    values, delta = (torch.linspace(0.1, 4, 6)[:, None] * torch.randn(6, 20, generator=draws) for _ in range(2))
    confidence = torch.linspace(-2, 2, 6) if sure else None
    requests = [
        SimpleNamespace(params=SamplingParams(temperature=1.0), seed=b, tokens=[7], prompt_length=1) for b in range(6)
    ]
    one, columns = put(torch.ones(6, dtype=torch.int32)), DraftVocabulary(20, None, None)
    plan = GrowthPlan.of(Beam(1, 4, **CAPE), 6, backend.device)
    drawn = DrawnTrees(plan, one[:, None], one, columns, Sampling.of(requests, backend.device))
    assert drawn.add(Logits(put(values), put(delta), None if confidence is None else put(confidence))) is None
    assert drawn.logits.cpu().equal(values + delta)
    chances = (values + delta).log_softmax(-1).amax(-1) if confidence is None else confidence.sigmoid().log()
    widths = [reference.width_of(each, **CAPE) for each in chances.tolist()]
    assert (drawn.columns[2] > 0).sum(1).tolist() == widths and len({*widths}) == 3
