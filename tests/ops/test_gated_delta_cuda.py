"""The CUDA kernels of gated_delta, compact_states and gate_heads against their references in double precision."""

from dataclasses import replace
from random import Random

import pytest
import torch

from specengine import _C
from specengine.ops.gated_delta import gated_delta as ops
from specengine.ops.layer import gate_heads, gate_heads_reference
from tests.ops.cases import CACHE_DTYPES, ancestor_bits, chain, comb, path_to, randn, star
from tests.ops.deltas import EPS, SHAPES, columns_of, copied, new_states, random_tree, run, small_layer, starts

POISON = -77.0
PRECISION = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def put(backend, layer, states):
    there = {name: backend.put(getattr(layer, name)) for name in ("conv", "decay", "dt_bias", "norm")}
    copies = (backend.put(x.clone()) if isinstance(x, torch.Tensor) else x for x in states)
    return replace(layer, **there), _C.DeltaStates(*copies)


def double(states):
    return _C.DeltaStates(*(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in states))


def doubled(layer):
    return replace(layer, **{name: getattr(layer, name).double() for name in ("conv", "decay", "dt_bias", "norm")})


def passed(backend, layer, rows, states, number, trees=None, counts=None, dtype=torch.float32):
    """(out, states with records) after a pass on the backend."""
    layer, states = put(backend, layer, states)
    out = run(ops.gated_delta, layer, backend.put(rows), states, number, trees, counts, dtype)
    return out.cpu(), _C.DeltaStates(*(x.cpu() if torch.is_tensor(x) else x for x in states))


def compacted(backend, layer, states, counts, paths):
    _, states = put(backend, layer, states)
    longest = max(1, *map(len, paths))
    padded = torch.tensor([path + [-1] * (longest - len(path)) for path in paths], dtype=torch.int32)
    lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    where = (backend.put(x) for x in (starts(counts), padded, lengths))
    ops.compact_states(states, *where, layer.key_heads, layer.tiled)
    return _C.DeltaStates(*(x.cpu() if torch.is_tensor(x) else x for x in states))


def assert_close(got, expected, limit):
    assert (got.double() - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_and_their_compaction_are_those_of_the_reference(cuda_backend, shape, tiled, dtype):
    layer, random = small_layer(*shape, tiled=tiled), Random(3)
    trees = [random_tree(9, random), random_tree(4, random)]
    rows, ours, theirs = randn(13, columns_of(layer)), new_states(layer, 13, [2, 0]), new_states(layer, 13, [2, 0])
    expected_states = double(theirs)
    before = copied(ours)
    for number in range(2):
        out, ours = passed(cuda_backend, layer, rows, ours, number, trees, dtype=dtype)
        expected = run(
            ops.gated_delta_reference, doubled(layer), rows.double(), expected_states, number, trees, dtype=torch.double
        )
        assert_close(out, expected, PRECISION[dtype])
    assert torch.equal(ours.states, before.states) and torch.equal(ours.conv, before.conv)
    assert_close(ours.records, expected_states.records, 1e-6)
    paths = [path_to(tree, len(tree) - 1) for tree in trees]
    ours = compacted(cuda_backend, layer, ours, [9, 4], paths)
    padded = torch.tensor([path + [-1] * (9 - len(path)) for path in paths], dtype=torch.int32)
    lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    ops.compact_states_reference(expected_states, starts([9, 4]), padded, lengths, layer.key_heads, tiled)
    assert_close(ours.states, expected_states.states, 1e-6)
    assert torch.equal(ours.conv.double(), expected_states.conv)
    assert torch.equal(ours.states[[1, 3]], before.states[[1, 3]])  # slots without a request


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_final_rows_leave_the_states_of_the_reference(cuda_backend, shape):
    layer = small_layer(*shape)
    counts, slots = [5, 1, 0, 2], [3, 0, 1, 2]
    rows, states = randn(8, columns_of(layer)), new_states(layer, 8, slots, final=True)
    expected_states = double(copied(states))
    out, after = passed(cuda_backend, layer, rows, states, 1, counts=counts)
    expected = run(
        ops.gated_delta_reference, doubled(layer), rows.double(), expected_states, 1, counts=counts, dtype=torch.double
    )
    assert_close(out, expected, PRECISION[torch.float32])
    assert_close(after.states, expected_states.states, 1e-6)
    assert torch.equal(after.conv.double(), expected_states.conv)
    assert torch.equal(after.states[1], states.states[1]) and torch.equal(after.states[:, 0], states.states[:, 0])


@pytest.mark.parametrize("nodes", [1, 2, 7, 33, 70])
@pytest.mark.parametrize("kind", ["random", "star", "comb", "chain"])
def test_a_node_of_any_tree_has_the_bits_of_its_path_alone(cuda_backend, kind, nodes):
    random, layer = Random(nodes), small_layer(1, 2, 16, 12)
    make = {"random": lambda n: random_tree(n, random), "star": star, "comb": comb, "chain": chain}[kind]
    tree, other = make(nodes), star(3)
    rows = randn(nodes + 3, columns_of(layer), seed=nodes)
    states = new_states(layer, nodes + 3, [1, 3])
    together, recorded = passed(cuda_backend, layer, rows, states, 0, [tree, other])
    for node in {nodes - 1, *random.sample(range(nodes), min(nodes, 4))}:  # the last one: of the last word of bits
        path = path_to(tree, node)
        alone = new_states(layer, len(path), [1], final=True)
        out, plain = passed(cuda_backend, layer, rows[path].contiguous(), alone, 0, counts=[len(path)])
        assert torch.equal(together[path], out)
        assert torch.equal(recorded.records[0, path], plain.records[0])
        after = compacted(cuda_backend, layer, recorded, [nodes, 3], [path, []])
        assert torch.equal(after.states[1, 0], plain.states[1, 0])
        assert torch.equal(after.conv[1, 0], plain.conv[1, 0])
        assert torch.equal(after.states[3], states.states[3]) and torch.equal(after.conv[3], states.conv[3])


def test_states_are_the_same_however_a_text_is_cut(cuda_backend):
    layer = small_layer(1, 2, 20, 12)
    rows = randn(20, columns_of(layer), seed=4)
    start = new_states(layer, 20, [1], final=True)
    expected, whole = passed(cuda_backend, layer, rows, start, 1, counts=[20])
    for cuts in ([1] * 20, [2, 1, 3, 14], [19, 1]):
        states, at, found = copied(start), 0, []
        for count in cuts:
            part = states._replace(records=states.records[:, :count].contiguous())
            out, states = passed(cuda_backend, layer, rows[at : at + count], part, 1, counts=[count])
            found.append(out)
            states, at = states._replace(records=start.records), at + count
        assert torch.equal(torch.cat(found), expected)
        assert torch.equal(states.states, whole.states)
        assert torch.equal(states.conv, whole.conv)


def test_chains_that_are_not_final_leave_records_and_no_states(cuda_backend):
    layer, rows = small_layer(), randn(5, columns_of(small_layer()))
    states = new_states(layer, 5, [1, 0])
    out, after = passed(cuda_backend, layer, rows, states, 1, counts=[3, 2])
    as_trees, recorded = passed(cuda_backend, layer, rows, states, 1, [chain(3), chain(2)])
    assert torch.equal(out, as_trees) and torch.equal(after.records, recorded.records)
    assert torch.equal(after.states, states.states) and torch.equal(after.conv, states.conv)


def test_padding_rows_become_zeros_and_touch_no_state(cuda_backend):
    layer, trees = small_layer(1, 2, 16, 12), [star(4), chain(3), comb(4)]
    rows, bits = randn(13, columns_of(layer)), torch.zeros(13, 1, dtype=torch.int32)
    bits[:11] = ancestor_bits(trees)
    padding = [3, 4, 5, 6, 10, 11, 12]  # nodes of the first and last tree, all of the second, rows behind all
    bits[padding], rows[padding] = 0, torch.nan
    there, states = put(cuda_backend, layer, new_states(layer, 13, [2, 0, 1]))
    states.slots[1] = 2**30  # of a request without rows, whatever it is
    out = cuda_backend.put(torch.full((13, 24), POISON))
    place = (cuda_backend.put(starts([4, 3, 4])), cuda_backend.put(bits))
    ops.gated_delta(cuda_backend.put(rows), there, states, 0, *place, out, EPS)
    out, whole = out.cpu(), [row for row in range(13) if row not in padding]
    assert out[padding].eq(0).all() and out[whole].isfinite().all()
    assert states.records[0, padding].eq(0).all()
    kept = [[-1, 0, 0], [-1, 0, 0]]
    same, _ = passed(cuda_backend, layer, rows[whole], new_states(layer, 6, [2, 1]), 0, kept)
    assert torch.equal(out[whole], same)


def test_a_wrong_parent_is_seen(cuda_backend):
    """The control of the tests of bits: a node moved to another parent has other bits."""
    layer, rows = small_layer(), randn(3, columns_of(small_layer()))
    one, _ = passed(cuda_backend, layer, rows, new_states(layer, 3, [1]), 0, [[-1, 0, 1]])
    other, _ = passed(cuda_backend, layer, rows, new_states(layer, 3, [1]), 0, [[-1, 0, 0]])
    assert torch.equal(one[:2], other[:2])
    assert not torch.equal(one[2], other[2])


def test_what_the_kernels_have_no_room_for_is_refused(cuda_backend):
    for shape in ((1, 1, 136, 8), (1, 1, 8, 136)):
        layer = small_layer(*shape)
        message = f"^states: heads of {shape[2]} x {shape[3]}, at most 128 x 128 are supported on cuda"
        with pytest.raises(ValueError, match=message):
            passed(cuda_backend, layer, randn(1, columns_of(layer)), new_states(layer, 1, [0]), 0, [[-1]])
        with pytest.raises(ValueError, match=message):
            compacted(cuda_backend, layer, new_states(layer, 1, [0]), [1], [[0]])
    layer, states = put(cuda_backend, small_layer(), new_states(small_layer(), 1, [0]))
    rows, out = cuda_backend.put(randn(1, columns_of(layer))), cuda_backend.put(torch.zeros(1, 80))
    place = (cuda_backend.put(starts([1])), cuda_backend.put(torch.ones(1, 9, dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"^ancestors: expected at most 8 words on cuda, got 9"):
        ops.gated_delta(rows, layer, states, 0, *place, out, EPS)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (1, 1, 5), (6, 1, 128)])
def test_gates_are_those_of_the_reference(cuda_backend, heads, kv_heads, dim, dtype):
    qkv = 4 * randn(3, 2 * (heads + kv_heads) * dim)
    found, expected = randn(3, heads, dim, seed=2).to(dtype), randn(3, heads, dim, seed=2).to(dtype).double()
    found = cuda_backend.put(found)
    gate_heads(cuda_backend.put(qkv), found)
    gate_heads_reference(qkv.double(), expected)
    assert_close(found.cpu(), expected, PRECISION[dtype])


def test_open_gates_keep_heads_and_shut_ones_clear_them(cuda_backend):
    gates, heads = torch.tensor([100.0, -200.0, 0.0]), randn(2, 3, 4)
    qkv = torch.cat([randn(2, 3, 4), gates[:, None].expand(2, 3, 4)], dim=2).flatten(1)
    found = cuda_backend.put(heads.clone())
    gate_heads(cuda_backend.put(torch.cat([qkv, randn(2, 8)], dim=1)), found)
    assert torch.equal(found.cpu(), heads * torch.tensor([1.0, 0.0, 0.5])[:, None])


def test_an_empty_path_leaves_its_state_alone(cuda_backend):
    layer = small_layer(1, 2, 16, 12)
    states = new_states(layer, 4, [2, 0])
    _, recorded = passed(cuda_backend, layer, randn(4, columns_of(layer)), states, 0, [chain(2), chain(2)])
    after = compacted(cuda_backend, layer, recorded, [2, 2], [[], [0, 1]])
    assert torch.equal(after.states[1:], states.states[1:]) and torch.equal(after.conv[1:], states.conv[1:])
    assert not torch.equal(after.states[0], states.states[0])
