"""The loop that grows trees: on the CPU, on the simulator and inside captured cycles, against the definition."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.shapes import Beam, BestFirst, Ranks
from specengine.drafters.drawn_trees import Sampling
from specengine.ops import cuda_ops
from specengine.ops.draw_siblings import draw_siblings_reference
from specengine.ops.growth.top_tokens import top_tokens
from specengine.tensor_parallel.loading import load_model
from tests.drafters.table_drafter import Table
from tests.drafters.trained_files import write_trained
from tests.engines import tiny_engine
from tests.growth import reference

VOCAB, COLUMNS, LEVELS = 30, 23, 3
KNOWN = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:COLUMNS].tolist()
BY_TOKEN = 2 * torch.randn(LEVELS, VOCAB, COLUMNS, generator=torch.Generator().manual_seed(2))
AT_ONCE = 2 * torch.randn(LEVELS, COLUMNS, generator=torch.Generator().manual_seed(3))
PATHS = [[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 0, 1], [1, 0, 0], [1, 0, 2]]
SHAPES = {
    "chain": Beam(LEVELS, 1),
    "backbone": Beam(LEVELS, 3),
    "cape": Beam(LEVELS, 3, widths=(3, 2, 1), thresholds=(0.3, 0.6)),
    "beam of 2": Beam(LEVELS, 4, 2),
    "beam of 3": Beam(LEVELS, 3, 3),
    "ranks": Ranks(RankTree.of(PATHS)),
    "ddtree": BestFirst("ddtree", LEVELS, 12, 4),
    "jetspec": BestFirst("jetspec", LEVELS, 12, 4),
    "top2gap": BestFirst("top2gap", LEVELS, 12, 4, 1.5),
}
GAPLESS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]]  # of drawn children
LIMITS = (LEVELS, LEVELS, 1, 2)  # of the requests
NATIVE = {
    "eagle": "levels=3,top_k=3,nodes=20",
    "eagle3": "levels=3,top_k=4,nodes=9,beam=1",
    "fasteagle": "top_k=4",
    "glide": "length=3",
    "medusa": "nodes=20",
}
TRACED = SamplingParams(max_new_tokens=7, trace=True)


def requests_of(temperature: float = 0.0):
    """Requests that draw from several tokens, from fewer than a node has children, from one, and that do not draw."""
    own = {"prompt_length": 2, "drafter_reads": True, "drafter_states": {}}
    params = [SamplingParams(temperature=temperature, top_k=top_k) for top_k in (5, 2, 1)] + [SamplingParams()]
    return [
        SimpleNamespace(tokens=[7, 3, 5 + i], seed=40 + i, draft_limit=limit, params=each, **own)
        for i, (limit, each) in enumerate(zip(LIMITS, params, strict=True))
    ]


def table_of(shape, drawn_shape=None, at_once=False, vocab=VOCAB, **options) -> Table:
    logits = AT_ONCE if at_once else BY_TOKEN
    return Table(logits, shape, drawn_shape or Beam(LEVELS, 2), KNOWN, at_once=at_once, vocab=vocab, **options)


class Lists:
    """The children of every path below a root: the likeliest tokens and their log-probabilities."""

    def __init__(self, root: int, children: int, at_once: bool) -> None:
        self._root, self._count, self._at_once = root, children, at_once

    @cache  # noqa: B019 (a test's own)
    def _list(self, path):
        level = len(path)
        row = AT_ONCE[level] if self._at_once else BY_TOKEN[level, self.token(path) % VOCAB]
        tokens, log_probs = top_tokens(row[None].contiguous(), self._count)
        return [KNOWN[token] for token in tokens[0].tolist()], log_probs[0].tolist()

    def token(self, path) -> int:
        return self._list(path[:-1])[0][path[-1]] if path else self._root

    def __call__(self, path):
        return self._list(path)[1]


def paths_of(shape, children_of, levels: int, nodes: int) -> list[reference.Path]:
    """The tree by definition."""
    if isinstance(shape, BestFirst):
        if shape.kind == "ddtree":
            return reference.ddtree(children_of, shape.children, nodes, levels)
        beta = shape.beta if shape.kind == "top2gap" else None
        return reference.jetspec(children_of, shape.children, nodes, levels, beta)
    if isinstance(shape, Ranks):
        candidates = [tuple(path) for path in PATHS if len(path) <= levels]
    else:
        widths = shape.widths or (shape.children,)
        candidates = reference.beam(children_of, levels, shape.width, widths, shape.thresholds)
    return reference.best(candidates, children_of, nodes)


def expected_tree(shape, root: int, levels: int, at_once: bool, nodes: int) -> tuple[list[int], list[int]]:
    """Its tokens and parents."""
    lists = Lists(root, shape.children, at_once)
    paths = [(), *paths_of(shape, lists, levels, nodes)]
    return [lists.token(path) for path in paths], [paths.index(path[:-1]) if path else -1 for path in paths]


def drawn_tree(shape, request, noise: float, at_once: bool) -> tuple[list[int], list[int], list[torch.Tensor | None]]:
    """A drawn tree by definition: its tokens, parents, and the logits that each node's children were drawn from."""
    backbone = [(0,) * depth + (rank,) for depth in range(LEVELS) for rank in range(shape.children)]
    paths = backbone if isinstance(shape, Beam) else sorted(map(tuple, GAPLESS), key=lambda path: (len(path), path))
    places = {(): 0} | {path: place for place, path in enumerate(paths, start=1)}
    sampling = Sampling.of([request], torch.device("cpu"), noise)
    index = torch.full((VOCAB,), -1, dtype=torch.int32)
    index[KNOWN] = torch.arange(COLUMNS, dtype=torch.int32)
    tokens, parents = [request.tokens[-1], *[-1] * len(paths)], [-1, *(places[path[:-1]] for path in paths)]
    logits: list[torch.Tensor | None] = [None] * len(tokens)
    for path, place in places.items():
        children = [places[other] for other in paths if other[:-1] == path]
        if not children or tokens[place] < 0 or len(path) >= request.draft_limit:
            continue
        row = AT_ONCE[len(path)] if at_once else BY_TOKEN[len(path), tokens[place] % VOCAB]
        grown = SimpleNamespace(tokens=torch.tensor(tokens), parents=torch.tensor(parents), row_start=torch.tensor([0]))
        own = (torch.tensor([place]), grown, torch.tensor([0]), sampling.params, sampling.history)
        logits[place] = row
        if request.params.temperature or not noise:  # at temperature 0 one token has all probability
            drawn = draw_siblings_reference(row[None], *own, shape.children, False, index, noise > 0)[0].tolist()
        else:
            drawn = [KNOWN[column] for column in row.topk(shape.children).indices]
        for child, token in zip(children, drawn, strict=False):
            tokens[child] = token
    kept = [place for place, token in enumerate(tokens) if token >= 0]
    return [tokens[i] for i in kept], [-1, *(kept.index(parents[i]) for i in kept[1:])], [logits[i] for i in kept]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_the_loop_grows_the_likeliest_trees_of_the_definition(backend, name, at_once):
    shape = SHAPES[name]
    for nodes in {shape.candidates, 6}:
        drafter = table_of(shape, at_once=at_once, nodes=nodes)
        requests = requests_of()
        for request, tree in zip(requests, drafter.grow(requests), strict=True):
            expected = expected_tree(shape, request.tokens[-1], request.draft_limit, at_once, nodes)
            assert (tree.tokens, tree.parents) == expected, (name, nodes)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("name", ["chain", "backbone", "ranks"])
def test_the_loop_draws_the_trees_of_the_definition(backend, name, noise, at_once):
    shape = Ranks(RankTree.of(GAPLESS)) if name == "ranks" else SHAPES[name]
    drafter, requests = table_of(shape, shape, at_once), requests_of(temperature=0.8)
    drawn = drafter.draw(requests, Sampling.of(requests, drafter.device, noise))
    for request, tree, rows in zip(requests, *drawn.trees(LIMITS), strict=True):
        tokens, parents, logits = drawn_tree(shape, request, noise, at_once)
        assert ([*tree.tokens], [*tree.parents]) == (tokens, parents)
        for row, expected in zip(rows, logits, strict=True):
            assert (row < 0) == (expected is None) and (row < 0 or drawn.logits[row].equal(expected))


@pytest.mark.quick(2)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_captured_cycles_grow_the_trees_of_the_definition(cuda_backend, name, at_once):
    shape, model = SHAPES[name], device_model(cuda_backend)
    drafter = table_of(shape, at_once=at_once, target=model.target, vocab=model.config.vocab_size)
    outputs = Engine(model, drafter=drafter, max_batch_size=2).generate([[5, 9, 4], [7], [1, 2]], TRACED)
    for output in outputs:
        text = [*output.prompt_token_ids]
        for cycle in output.trace:
            levels = min(LEVELS, TRACED.max_new_tokens + len(output.prompt_token_ids) - len(text) - 1)
            expected = expected_tree(shape, text[-1], levels, at_once, drafter.max_nodes)
            assert ([*cycle.tokens], [*cycle.parents]) == (expected if levels else (text[-1:], [-1]))
            text += [*(cycle.tokens[node] for node in cycle.accepted), *([] if cycle.bonus is None else [cycle.bonus])]


def device_model(backend):
    ops = cuda_ops(backend.device, strict=True)
    return load_model("random:tiny-llama", device=backend.device.type, dtype="float32", ops=ops)


@pytest.mark.filterwarnings("ignore:drafter")
@pytest.mark.parametrize("name, options", NATIVE.items())
def test_the_native_loop_grows_what_the_loop_in_python_does(tmp_path_factory, name, options):
    (folder,) = {write_trained(tmp_path_factory.mktemp("drafters"))[name]}
    traces = []
    for native in (True, False):
        engine = tiny_engine(f"{folder},adaptive=false,{options}")
        assert engine.drafter.native is not None
        if not native:
            engine.drafter.native = None
        traces.append([output.trace for output in engine.generate([[5, 9, 4, 8], [7], [1, 2]], TRACED)])
    assert traces[0] == traces[1] and any(len(cycle.tokens) > 4 for trace in traces[0] for cycle in trace)
