"""What the first rank sends about passes and graphs of several devices, and what another one makes of it."""

from collections import deque
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from weakref import WeakValueDictionary

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.ops.prefill.chains import PromptChains
from specengine.tensor_parallel.device.follower import DeviceFollower
from specengine.tensor_parallel.device.messages import BeginCapture, DropGraphs, EndCapture
from specengine.tensor_parallel.device.passes import DevicePasses
from specengine.tensor_parallel.passes import RankPass
from specengine.utils import cuda_graphs
from specengine.utils.cuda_graphs import DeviceGraphs

CPU, HIDDEN, CACHE = torch.device("cpu"), 8, 3
TREES = [DraftTree([5, 6, 7], [-1, 0, 0]), DraftTree([8], [-1])]


def ints(*rows):
    return torch.tensor(rows, dtype=torch.int32)


class Ranks:
    """A first rank and another one, whose messages and tensors wait until deliver().

    ensured: lengths of rotary tables.  passes: arguments of the decoder.  compacted: of compact().
    """

    def __init__(self):
        self._messages, self._tensors = deque(), deque()
        self.ensured, self.passes, self.compacted = [], [], []
        self.first = DevicePasses.__new__(DevicePasses)
        DeviceGraphs.__init__(self.first, CPU)
        self.first._group = SimpleNamespace(broadcast=self._broadcast)
        self.first._collectives = SimpleNamespace(broadcast=self._tensors.append)
        rope = SimpleNamespace(ensure=self.ensured.append, cos_sin=("cos", "sin"))
        cache = SimpleNamespace(pages=SimpleNamespace(k="k", v="v"), compact=lambda *each: self.compacted.append(each))
        self.other = DeviceFollower((1, 2, CPU), HIDDEN, None, None, rope, {CACHE: cache})
        self.other._collectives = SimpleNamespace(broadcast=lambda x: x.copy_(self._tensors.popleft()))
        self.other.decoder = lambda *place, **known: self.passes.append((place, known))

    @contextmanager
    def _broadcast(self, message):
        self._messages.append(message)
        yield

    def deliver(self):
        while self._messages:
            message = self._messages.popleft()
            self.other.handlers[type(message)](message)


def test_a_pass_and_its_paths_arrive_as_they_were_sent():
    ranks, inputs = Ranks(), torch.arange(4.0 * HIDDEN).view(4, HIDDEN)
    batch = CacheBatch(ints([4, 2], [1, 0]), torch.tensor([70, 3], dtype=torch.int32))
    for tree in (TreeBatch.of(TREES, CPU, masked=True), TreeBatch.chains([[5, 6, 7], [8]], CPU)):
        chains = None if tree.ancestors is not None else PromptChains.of(tree.starts, [70, 3])
        with ranks.first.run(RankPass(CACHE, tree, batch, inputs, 99, chains)):
            pass
        ranks.deliver()
        (rows, k, v, table, lengths, cos, sin), known = ranks.passes.pop()
        assert (k, v, cos, sin) == ("k", "v", "cos", "sin") and ranks.ensured.pop() == 99
        assert known["inputs"].equal(inputs) and len(rows.tokens) == 4
        assert table.equal(batch.block_table) and lengths.equal(batch.lengths)
        assert rows.depths.equal(tree.depths) and rows.row_start.equal(tree.row_start)
        if chains is None:
            assert rows.ancestors.equal(tree.ancestors) and "chains" not in known
        else:
            assert rows.ancestors is None and known["chains"].chains == chains.chains
        accepted = SimpleNamespace(
            path=ints([0, 2, -1], [0, -1, -1]), path_length=torch.tensor([2, 1], dtype=torch.int32)
        )
        with ranks.first.compact(CACHE, batch, accepted):
            pass
        ranks.deliver()
        expected = batch.block_table, batch.lengths, accepted.path, accepted.path_length
        assert all(ours.equal(theirs) for ours, theirs in zip(ranks.compacted.pop(), expected, strict=True))


def test_all_ranks_overlap_launches(monkeypatch):
    ranks, chosen = Ranks(), []
    monkeypatch.setattr(cuda_graphs, "_C", SimpleNamespace(set_programmatic_launch=chosen.append))
    for enabled in (True, False):
        ranks.first.overlap_launches(enabled)
        ranks.deliver()
    assert chosen == [True, True, False, False]


class Captured:
    """A graph. pool: of its memory."""

    def __init__(self, pool):
        self.pool = pool


def test_another_rank_shares_pools_as_the_first_does_and_frees_what_it_drops(monkeypatch):
    handles, captured = count(), WeakValueDictionary()

    def capture_graph(run, device, *, pool, warm_up):
        run()
        graph = captured[len(pools)] = Captured(pool)
        pools.append(pool)
        return graph

    pools = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr("specengine.tensor_parallel.device.follower.capture_graph", capture_graph)
    handlers = DeviceFollower((1, 2, CPU), HIDDEN, EndCapture, None, None, {}).handlers
    for number, pool in enumerate(("a", "a", "b", None)):
        handlers[BeginCapture](BeginCapture(number, pool))
    assert pools == [0, 0, 1, None]
    handlers[DropGraphs](DropGraphs((0, 2)))
    assert [*captured] == [1, 3]
