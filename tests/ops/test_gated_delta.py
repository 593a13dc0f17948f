"""The gated delta rule against its reference, states that depend on a path alone, and their replay after acceptance."""

from random import Random

import pytest
import torch

from specengine import _C
from specengine.ops import native, reference
from specengine.ops.gated_delta import gated_delta as ops
from tests.ops.cases import path_to
from tests.ops.deltas import SHAPES, columns_of, copied, new_states, random_tree, run, small_layer, starts


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("tiled", [False, True])
def test_a_pass_and_its_compaction_are_those_of_the_reference(tiled):
    for shape in SHAPES:
        layer, random = small_layer(*shape, tiled=tiled), Random(3)
        trees = [random_tree(9, random), random_tree(4, random)]
        rows = torch.randn(13, columns_of(layer), generator=torch.Generator().manual_seed(2))
        ours, theirs = new_states(layer, 13, [2, 0]), new_states(layer, 13, [2, 0])
        for number in range(2):
            found = run(ops.gated_delta, layer, rows, ours, number, trees)
            expected = run(ops.gated_delta_reference, layer, rows, theirs, number, trees)
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
        assert torch.equal(ours.states, theirs.states)  # a pass over trees leaves the committed states alone
        paths = [path_to(tree, len(tree) - 1) for tree in trees]
        padded = torch.tensor([path + [-1] * (9 - len(path)) for path in paths], dtype=torch.int32)
        lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
        where = (starts([9, 4]), padded, lengths, layer.key_heads, tiled)
        native.compact_states(ours, *where)
        reference.compact_states(theirs, *where)
        torch.testing.assert_close(ours.states, theirs.states, rtol=2e-5, atol=2e-5)
        assert torch.equal(ours.conv, theirs.conv)


@pytest.mark.usefixtures("instruction_set")
def test_a_node_of_any_tree_has_the_bits_of_its_path_alone():
    random, layer = Random(5), small_layer(2, 4, 16, 24)
    for nodes in (1, 2, 7, 16, 33, 64):
        tree = random_tree(nodes, random)
        rows = torch.randn(nodes, columns_of(layer), generator=torch.Generator().manual_seed(nodes))
        together = run(ops.gated_delta, layer, rows, new_states(layer, nodes, [1]), 0, [tree])
        for node in random.sample(range(nodes), min(nodes, 12)):
            path = path_to(tree, node)
            states = new_states(layer, len(path), [1], final=True)
            alone = run(ops.gated_delta, layer, rows[path].contiguous(), states, 0, counts=[len(path)])
            assert torch.equal(together[node], alone[-1])


@pytest.mark.usefixtures("instruction_set")
def test_states_are_the_same_however_a_text_is_cut():
    layer = small_layer()
    rows = torch.randn(30, columns_of(layer), generator=torch.Generator().manual_seed(4))
    whole = new_states(layer, 30, [1], final=True)
    expected = run(ops.gated_delta, layer, rows, whole, 1, counts=[30])
    for cuts in ([1] * 30, [2, 1, 3, 24], [29, 1], [7] * 4 + [2]):
        states, at, found = new_states(layer, 30, [1], final=True), 0, []
        for count in cuts:
            part = states._replace(records=states.records[:, :count].contiguous())
            found.append(run(ops.gated_delta, layer, rows[at : at + count], part, 1, counts=[count]))
            at += count
        assert torch.equal(torch.cat(found), expected)
        assert torch.equal(states.states, whole.states)
        assert torch.equal(states.conv, whole.conv)


@pytest.mark.usefixtures("instruction_set")
def test_a_replayed_path_leaves_the_state_of_plain_decoding():
    random, layer = Random(7), small_layer(1, 3, 16, 16)
    for trial in range(60):
        nodes = random.randrange(1, 25)
        tree = random_tree(nodes, random)
        path = path_to(tree, random.randrange(nodes))
        rows = torch.randn(nodes, columns_of(layer), generator=torch.Generator().manual_seed(trial))
        drafted = new_states(layer, nodes, [3], seed=trial)
        plain = copied(drafted)._replace(records=torch.zeros(1, 1, drafted.records.shape[2]), final=True)
        for number in range(2):
            run(ops.gated_delta, layer, rows, drafted, number, [tree])
            for node in path:
                run(ops.gated_delta, layer, rows[node : node + 1], plain, number, counts=[1])
        paths = torch.tensor([path], dtype=torch.int32)
        count = torch.tensor([len(path)], dtype=torch.int32)
        ops.compact_states(drafted, starts([nodes]), paths, count, layer.key_heads, False)
        assert torch.equal(drafted.states, plain.states)
        assert torch.equal(drafted.conv, plain.conv)


def test_a_wrong_parent_is_seen():
    """The control of the tests above: a node moved to another parent has other bits."""
    layer = small_layer()
    rows = torch.randn(3, columns_of(layer), generator=torch.Generator().manual_seed(1))
    one = run(ops.gated_delta, layer, rows, new_states(layer, 3, [1]), 0, [[-1, 0, 1]])
    other = run(ops.gated_delta, layer, rows, new_states(layer, 3, [1]), 0, [[-1, 0, 0]])
    assert torch.equal(one[:2], other[:2])
    assert not torch.equal(one[2], other[2])


def test_gates_and_partial_rotation_are_those_of_the_reference():
    rows, heads, kv_heads, dim = 6, 4, 2, 16
    qkv = torch.randn(rows, (2 * heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(0))
    cos, sin = torch.rand(9, 3), torch.rand(9, 3)
    found = []
    for layer_ops in (native.layer, reference.layer):
        cache = torch.zeros(2, 1, kv_heads, _C.PAGE_SIZE, dim)
        place = _C.KVCacheView(*cache, *(torch.tensor(x, dtype=torch.int32) for x in ([[0]], [2], [0, rows])), 0)
        q = torch.zeros(rows, heads, dim)
        depths = torch.arange(rows, dtype=torch.int32)
        layer_ops.rope_cache(qkv, cos, sin, torch.ones(dim), torch.ones(dim), depths, place, q, 1e-6)
        layer_ops.gate_heads(qkv, q)
        found.append((q, cache))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
