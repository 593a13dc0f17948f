"""select_nodes against a construction by definition, its reference, and what it makes of trees that are none."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import pytest
import torch

from specengine import _C
from specengine.ops.expand_backbone import expand_backbone
from specengine.ops.select_nodes import SelectedTrees, select_limited, select_nodes, select_nodes_reference
from tests.ops.cases import NODE_COUNTS, ancestor_bits, randn

INF, NAN = float("inf"), float("nan")
MOST = _C.MAX_CANDIDATES
POISON = -77


@dataclass
class Candidates:
    """Of a batch: the arguments of the op, in order."""

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    limits: torch.Tensor

    @staticmethod
    def of(parents: list[list[int]], scores: list[list[float]], limits: list[int]) -> Candidates:
        """Token of candidate i: 100 + i. A parent of None: there is no candidate."""
        depths: list[list[int]] = []
        for row in parents:
            own: list[int] = []
            for parent in row:
                own.append(-1 if parent is None else own[parent] + 1 if parent >= 0 else 0)
            depths.append(own)
        ids = torch.arange(100, 100 + len(parents[0]), dtype=torch.int32).repeat(len(parents), 1)
        holes = [[-5 if parent is None else parent for parent in row] for row in parents]
        as_ints = [torch.tensor(values, dtype=torch.int32) for values in (holes, depths, limits)]
        return Candidates(ids, *as_ints[:2], torch.tensor(scores, dtype=torch.float32), as_ints[2])


def select(backend, candidates: Candidates, nodes: int) -> SelectedTrees:
    """On the backend, into poisoned trees; the trees on the CPU."""
    trees = SelectedTrees.empty(len(candidates.limits), nodes, backend.device)
    for tensor in vars(trees).values():
        tensor.fill_(POISON)
    assert select_nodes(*(backend.put(each) for each in vars(candidates).values()), trees) is trees
    return SelectedTrees(**{name: tensor.cpu() for name, tensor in vars(trees).items()})


def assert_equal(trees: SelectedTrees, expected: SelectedTrees) -> None:
    for field in fields(SelectedTrees):
        assert torch.equal(getattr(trees, field.name), getattr(expected, field.name)), field.name


def check(backend, candidates: Candidates, nodes: int) -> SelectedTrees:
    trees = select(backend, candidates, nodes)
    assert_equal(trees, select_nodes_reference(*vars(candidates).values(), nodes))
    return trees


def by_definition(c: Candidates, nodes: int) -> SelectedTrees:
    """A candidate is kept if it is the root or fewer than N - 1 others that are not too deep come before it."""
    trees = SelectedTrees.empty(len(c.limits), nodes)
    for b, limit in enumerate(c.limits.tolist()):
        tokens, parents, depths, scores = (x[b].tolist() for x in (c.tokens, c.parents, c.depths, c.scores))
        others = [i for i, depth in enumerate(depths) if 1 <= depth <= limit]

        def comes_before(i: int, j: int, scores=scores) -> bool:
            return scores[i] > scores[j] or (scores[i] == scores[j] and i < j)

        kept = [j for j in others if sum(comes_before(i, j) for i in others) < nodes - 1]
        kept = [0, *kept] if limit >= 0 and depths[0] == 0 else []
        count = trees.node_counts[b] = len(kept)
        if not kept:
            continue
        tree = [-1, *(kept.index(parents[i]) for i in kept[1:])]  # an orphan raises
        rows = ([tokens[i] for i in kept], tree, [depths[i] for i in kept], kept)
        for out, row in zip((trees.tokens, trees.parents, trees.depths, trees.kept), rows, strict=True):
            out[b, :count] = torch.tensor(row, dtype=torch.int32)
        trees.ancestors[b, :count] = ancestor_bits([tree], trees.ancestors.shape[2])
    return trees


def random_candidates(rng: random.Random, batch: int, count: int) -> Candidates:
    """Random trees with holes, scores of few values so that many are equal, limits, idle requests."""
    rows: list[tuple[list, list]] = []
    for _ in range(batch):
        parents, scores = [-1], [0.0]
        width = rng.choice([1, 3, count])  # of the youngest candidates, how many may have children
        for i in range(1, count):
            living = [j for j in range(max(0, i - width), i) if parents[j] is not None] or [0]
            parent = rng.choice(living)
            hole = rng.random() < 0.1
            parents.append(None if hole else parent)
            step = rng.choice([0, 0, 0.25, 0.5, 1, INF if rng.random() < 0.1 else 2])
            scores.append(NAN if hole else scores[parent] - step)
        rows.append((parents, scores))
    limits = [rng.choice([-1, 0, 1, 2, 3, 5, 9, 1000, 1000, 1000]) for _ in rows]
    return Candidates.of([parents for parents, _ in rows], [scores for _, scores in rows], limits)


def eagle3(seed: int, levels: int = 8, k: int = 10) -> Candidates:
    """Every level the k best children of each of the k best nodes of the level before: 711 candidates of EAGLE-3."""
    rng = torch.Generator().manual_seed(seed)
    parents, scores, beam = [-1], [0.0], [0]
    for _ in range(levels):
        first = len(parents)
        for parent in beam:
            steps = torch.randn(50, generator=rng).mul(2).log_softmax(0).topk(k).values
            parents += [parent] * k
            scores += (steps + scores[parent]).tolist()
        beam = sorted(range(first, len(parents)), key=lambda i: (-scores[i], i))[:k]
    return Candidates.of([parents], [scores], [levels])


def test_a_small_tree_by_hand(backend):
    parents, scores = [-1, 0, 0, 1, 2, 2, 5], [0, -3, -1, -4, -2.5, -2, -2]
    trees = check(backend, Candidates.of([parents], [scores], [9]), 5)
    assert trees.kept.tolist() == [[0, 2, 4, 5, 6]]
    assert trees.tokens.tolist() == [[100, 102, 104, 105, 106]]
    assert trees.parents.tolist() == [[-1, 0, 1, 1, 3]]
    assert trees.depths.tolist() == [[0, 1, 2, 2, 3]]
    assert trees.ancestors.tolist() == [[[0b1], [0b11], [0b111], [0b1011], [0b11011]]]
    assert trees.node_counts.tolist() == [5]


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_cases_equal_the_construction_by_definition(backend, seed):
    rng = random.Random(seed)
    kinds = set()
    for _ in range(20):
        count = rng.choice([1, 2, 7, 30, rng.randrange(1, 70), rng.randrange(1, 130)])
        nodes = rng.choice([1, 2, rng.randrange(1, 20), rng.randrange(1, 70), count, count + 5])
        candidates = random_candidates(rng, 5, count)
        trees = check(backend, candidates, nodes)
        assert_equal(trees, by_definition(candidates, nodes))
        kinds |= {"idle" if n == 0 else "full" if n == nodes else "short" for n in trees.node_counts.tolist()}
    assert kinds == {"idle", "full", "short"}


@pytest.mark.parametrize("nodes", NODE_COUNTS)
def test_trees_of_any_size_are_cut_from_any_number_of_candidates(backend, nodes):
    rng = random.Random(nodes)
    for count in sorted({1, 2, nodes, nodes + 1, 31, 32, 33, 64, 255, 256, 257, 513}):
        check(backend, random_candidates(rng, 2, count), nodes)


@pytest.mark.parametrize("nodes", [1, 60, 256])
def test_as_many_candidates_as_there_may_be(backend, nodes):
    for count in (MOST - 1, MOST):
        candidates = random_candidates(random.Random(count), 1, count)
        candidates.limits.fill_(1000)
        assert check(backend, candidates, nodes).node_counts.tolist() == [nodes]


@pytest.mark.parametrize("seed", range(3))
def test_the_candidates_of_eagle3(backend, seed):
    candidates = eagle3(seed)
    assert candidates.tokens.shape == (1, 10 + 7 * 100 + 1)
    assert_equal(check(backend, candidates, 60), by_definition(candidates, 60))


def test_a_chain_is_cut_at_its_end(backend):
    chain = Candidates.of([[i - 1 for i in range(300)]], [[-0.5 * i for i in range(300)]], [1000])
    for nodes in (1, 40, 256):
        assert check(backend, chain, nodes).kept.tolist() == [list(range(nodes))]


def test_equal_scores_go_to_the_lower_candidate_and_never_past_a_parent(backend):
    star = Candidates.of([[-1] + [0] * 599], [[0.0] * 600], [3])
    assert check(backend, star, 70).kept.tolist() == [list(range(70))]
    signed = Candidates.of([[-1, 0, 0, 0]], [[0.0, -0.0, 0.0, -0.0]], [3])
    assert check(backend, signed, 3).kept.tolist() == [[0, 1, 2]]
    line = Candidates.of([[-1, 0, 1, 2, 3]], [[0.0] * 5], [9])
    assert check(backend, line, 4).parents.tolist() == [[-1, 0, 1, 2]]


def test_neighbouring_floats_are_told_apart(backend):
    scores = torch.full((40,), -1.0)
    for i in range(2, 40):
        scores[i] = torch.nextafter(scores[i - 1], torch.tensor(INF))
    star = Candidates.of([[-1] + [0] * 39], [[0.0, *scores[1:].tolist()]], [3])
    assert check(backend, star, 5).kept.tolist() == [[0, 36, 37, 38, 39]]


def test_candidates_of_no_probability_are_kept_last(backend):
    candidates = Candidates.of([[-1, 0, 0, 1, 0, 2]], [[0, -INF, -3e38, -INF, -INF, -INF]], [9])
    assert check(backend, candidates, 2).kept.tolist() == [[0, 2]]
    assert check(backend, candidates, 4).kept.tolist() == [[0, 1, 2, 3]]
    assert check(backend, candidates, 8).node_counts.tolist() == [6]


def test_what_is_too_deep_takes_no_place(backend):
    candidates = Candidates.of([[-1, 0, 1, 2, 0, 0]] * 4, [[0, -1, -1, -1, -2, -3]] * 4, [0, 1, 2, 3])
    trees = check(backend, candidates, 4)
    assert trees.kept.tolist() == [[0, -1, -1, -1], [0, 1, 4, 5], [0, 1, 2, 4], [0, 1, 2, 3]]
    assert trees.node_counts.tolist() == [1, 4, 4, 4]


def test_an_idle_request_gets_no_nodes_and_its_candidates_are_not_read(backend):
    candidates = Candidates.of([[-1, 0, 0]] * 3, [[0, -1, -2]] * 3, [5, -1, 5])
    candidates.scores[1], candidates.parents[1], candidates.depths[1] = NAN, 99, 99
    trees = check(backend, candidates, 3)
    assert trees.node_counts.tolist() == [3, 0, 3]
    assert trees.tokens[1].tolist() == trees.kept[1].tolist() == [-1] * 3 and not trees.ancestors[1].any()


def test_a_request_without_candidates_gets_no_nodes(backend):
    nothing = Candidates.of([[None] * 4], [[NAN] * 4], [5])
    assert check(backend, nothing, 3).node_counts.tolist() == [0]


def test_an_empty_batch_is_accepted(backend):
    candidates = Candidates.of([[-1, 0]], [[0, -1]], [5])
    empty = Candidates(**{name: tensor[:0] for name, tensor in vars(candidates).items()})
    assert select(backend, empty, 3).tokens.shape == (0, 3)


def test_the_tree_of_expand_backbone_is_cut(backend):
    root = torch.tensor([7, -1, 9], dtype=torch.int32)
    drafted = expand_backbone(backend.put(3 * randn(3, 6, 200)), backend.put(root), [8])
    candidates = Candidates(
        *(x.cpu() for x in (drafted.tokens, drafted.parents, drafted.depths, drafted.scores)),
        torch.full((3,), 4, dtype=torch.int32),
    )
    trees = check(backend, candidates, 16)
    assert_equal(trees, by_definition(candidates, 16))
    assert trees.node_counts.tolist() == [16, 0, 16] and trees.depths.max() <= 4


def test_trees_are_written_again_and_again(backend):
    trees = SelectedTrees.empty(2, 20, backend.device)
    rng = random.Random(1)
    for count in (50, 3, 200):
        candidates = random_candidates(rng, 2, count)
        arguments = [backend.put(each) for each in vars(candidates).values()]
        select_nodes(*arguments, trees)
        for name, expected in vars(select_nodes_reference(*vars(candidates).values(), 20)).items():
            assert torch.equal(getattr(trees, name).cpu(), expected), name


def test_nan_gives_minus_one_node_on_cuda(cuda_backend):
    for place in (0, 3, 299):
        candidates = Candidates.of([[-1] + [0] * 299] * 2, [[0.0] + [-1.0] * 299] * 2, [5, 5])
        candidates.scores[1, place] = -NAN if place == 3 else NAN
        trees = check(cuda_backend, candidates, 40)
        assert trees.node_counts.tolist() == [40, -1]
        for name, padding in {"tokens": -1, "parents": -1, "depths": -1, "kept": -1, "ancestors": 0}.items():
            assert getattr(trees, name)[1].eq(padding).all(), name


def test_what_has_no_kept_parent_is_dropped_on_cuda(cuda_backend):
    candidates = Candidates.of([[-1, 0, 1, 2, 0]], [[0, -9, -1, -2, -3]], [9])
    trees = check(cuda_backend, candidates, 4)  # chosen: 2, 3 and 4, but 1, above 2 and 3, is not
    assert trees.kept.tolist() == [[0, 4, -1, -1]] and trees.parents.tolist() == [[-1, 0, -1, -1]]
    assert trees.ancestors.tolist() == [[[0b1], [0b11], [0], [0]]] and trees.node_counts.tolist() == [2]


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_whatsoever_makes_an_orphan_on_cuda(cuda_backend, seed):
    rng = random.Random(seed)
    dropped = 0
    for _ in range(15):
        count, nodes = rng.randrange(1, 150), rng.randrange(1, 80)
        candidates = random_candidates(rng, 4, count)
        for tensor in (candidates.parents, candidates.depths):
            for _ in range(count // 3):
                value = rng.choice([-(2**31), -2, -1, 0, 1, 2, rng.randrange(count), count, 5000, 2**31 - 1])
                tensor[rng.randrange(4), rng.randrange(count)] = value
        swapped = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        candidates.scores = torch.where(torch.arange(4)[:, None] < 2, candidates.scores[:, swapped], candidates.scores)
        candidates.scores.nan_to_num_(-1.0)
        trees = check(cuda_backend, candidates, nodes)
        for b, found in enumerate(trees.node_counts.tolist()):
            assert all(-1 <= parent < node for node, parent in enumerate(trees.parents[b].tolist()))
            assert (trees.parents[b, 1:found] >= 0).all() and (trees.tokens[b, found:] == -1).all()
            dropped += 0 < found < min(nodes, count)
    assert dropped


@pytest.mark.usefixtures("instruction_set")
def test_neither_batch_nor_threads_change_a_bit():
    candidates = random_candidates(random.Random(3), 9, 100)
    expected = select_nodes_reference(*vars(candidates).values(), 30)
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        assert_equal(select_nodes(*vars(candidates).values(), SelectedTrees.empty(9, 30)), expected)


@pytest.mark.sim
def test_the_order_of_threads_and_blocks_changes_no_bit(simulated, monkeypatch):
    monkeypatch.setattr("specengine.ops.select_nodes._C", simulated)
    candidates = random_candidates(random.Random(4), 3, 400)
    expected = select_nodes_reference(*vars(candidates).values(), 50)
    for seed in range(4):
        simulated.set_schedule(seed)
        assert_equal(select_nodes(*vars(candidates).values(), SelectedTrees.empty(3, 50)), expected)


@pytest.mark.gpu
def test_a_captured_call_selects_anew_with_every_replay():
    if not _C.cuda_architectures or not torch.cuda.is_available():
        pytest.skip("no GPU, or no CUDA in this build or in torch")
    trees, batch = SelectedTrees.empty(1, 60, "cuda"), [x.cuda() for x in vars(eagle3(0)).values()]
    select_nodes(*batch, trees)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_nodes(*batch, trees)
    for seed in (1, 2):
        other = eagle3(seed)
        for place, tensor in zip(batch, vars(other).values(), strict=True):
            place.copy_(tensor)
        graph.replay()
        for name, expected in vars(select_nodes_reference(*vars(other).values(), 60)).items():
            assert torch.equal(getattr(trees, name).cpu(), expected), name


def test_depths_are_limited_by_what_may_be_committed(cuda_backend):
    known, length, final, active = (
        cuda_backend.put(torch.tensor(column, dtype=torch.int32))
        for column in ([1, 1, 0, 1, 3], [5, 5, 5, 5, 9], [40, 8, 40, 40, 9], [1, 1, 1, 0, 1])
    )
    chain = torch.arange(7, dtype=torch.int32).repeat(5, 1)
    columns = [cuda_backend.put(each) for each in (chain + 20, chain - 1, chain, -chain.float())]
    trees = SelectedTrees.empty(5, 8, cuda_backend.device)
    assert select_limited(columns, known, length, final, active, 4, trees) is trees
    assert trees.node_counts.tolist() == [5, 3, 1, 0, 1]
    expected = SelectedTrees.empty(5, 8, cuda_backend.device)
    select_nodes(*columns, cuda_backend.put(torch.tensor([4, 2, 0, -1, 0], dtype=torch.int32)), expected)
    for ours, theirs in zip(vars(trees).values(), vars(expected).values(), strict=True):
        assert ours.equal(theirs)
    with pytest.raises(ValueError, match=r"^levels: expected 0 or more, got -1"):
        select_limited(columns, known, length, final, active, -1, trees)
