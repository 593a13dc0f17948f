"""Every rank reads its own rows, and the shards of all ranks together are the model."""

import dataclasses

import pytest
import torch

from specengine import Engine
from specengine.models.checkpoint import RandomCheckpoint, open_checkpoint
from specengine.models.checkpoint_base import CPU
from specengine.models.presets import PRESETS
from specengine.models.weights import WeightLoader
from specengine.ops import native, reference
from specengine.tensor_parallel.loading import load_model
from specengine.tensor_parallel.shards import ShardBounds, ShardedProjection, ShardLoader
from tests.engines import tiny_model
from tests.tensor_parallel.odd import ODD

CUT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Counting(RandomCheckpoint):
    """Counts the rows read from each tensor."""

    def __init__(self, config):
        super().__init__(config)
        self.read_of = dict.fromkeys(self.tensors, 0)

    def read_rows(self, name, start, stop, device=CPU):
        self.read_of[name] += stop - start
        return super().read_rows(name, start, stop, device)


def rows_of(projection):
    parts = []
    for weight in projection.weights:
        columns = weight.data.shape[1] * (32 if weight.quantises_rows else 1)
        out = torch.empty(weight.rows, columns)
        native.layer.gather_rows(weight, torch.arange(weight.rows, dtype=torch.int32), out)
        parts.append(out)
    return torch.cat(parts)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_the_parts_put_together_are_the_model(size, dtype):
    checkpoint = RandomCheckpoint(ODD)
    whole = WeightLoader(checkpoint, dtype, CPU, native).layer(1)
    bounds = ShardBounds.of(ODD, size)
    layers = [ShardLoader(checkpoint, dtype, bounds, rank).layer(1) for rank in range(size)]
    configs = [bounds.config(rank, ODD) for rank in range(size)]
    keys, inner = ([c.num_kv_heads * c.head_dim for c in configs], [c.intermediate_size for c in configs])
    queries = [c.num_heads * c.head_dim for c in configs]
    hidden = [*map(int.__sub__, bounds.hidden[1:], bounds.hidden)]
    matrices = {
        "qkv": (queries, keys, keys),
        "attention_out": (hidden,),
        "gate_up": (inner, inner),
        "down": (hidden,),
    }
    for name, sizes in matrices.items():
        own, expected = [getattr(layer, name) for layer in layers], getattr(whole, name)
        counts = [[each[rank] for each in sizes] for rank in range(size)]
        for together, read in ((rows_of(expected), rows_of), (expected.bias, lambda projection: projection.bias)):
            pieces = [read(part).split(rows) for part, rows in zip(own, counts, strict=True)]
            assert torch.equal(torch.cat([piece[i] for i in range(len(sizes)) for piece in pieces]), together)
    for layer in layers:
        assert isinstance(layer.down, ShardedProjection) and layer.down.columns_of == tuple(inner)
        assert isinstance(layer.attention_out, ShardedProjection) and layer.attention_out.columns_of == tuple(queries)


def test_a_rank_reads_its_own_rows_only():
    checkpoint = Counting(ODD)
    bounds = ShardBounds.of(ODD, 3)
    for rank in range(3):
        loader = ShardLoader(checkpoint, "float32", bounds, rank)
        for layer in range(ODD.num_layers):
            loader.layer(layer)
    for name, info in checkpoint.tensors.items():
        if name.split(".")[-2] in CUT and name.endswith("weight"):
            assert checkpoint.read_of[name] == info.shape[0]


def test_a_bias_of_another_size_than_its_matrix_is_refused():
    class Longer(RandomCheckpoint):
        def read(self, name):
            found = super().read(name)
            return torch.cat([found, found[:1]]) if name.endswith("q_proj.bias") else found

    loader = ShardLoader(Longer(ODD), "float32", ShardBounds.of(ODD, 3), rank=1)
    with pytest.raises(ValueError, match=r"q_proj.bias' has shape \(145,\), expected \(144,\)"):
        loader.layer(0)


def test_parts_are_as_even_as_can_be_and_the_first_is_the_smallest():
    bounds = ShardBounds.of(ODD, 2)
    assert bounds == ShardBounds(heads=(0, 1, 3), inner=(0, 80, 160), hidden=(0, 32, 64))
    assert bounds.config(0, ODD).num_heads == 3 and bounds.config(1, ODD).num_heads == 6
    assert ShardBounds.of(PRESETS["llama-3.1-8b"], 4).heads == (0, 2, 4, 6, 8)


@pytest.mark.parametrize(
    "changes", [{"num_heads": 4, "num_kv_heads": 1}, {"intermediate_size": 31}, {"hidden_size": 24}]
)
def test_what_cannot_be_shared_is_refused(changes):
    with pytest.raises(ValueError, match=r"^tensor_parallel: 2 processes cannot share "):
        ShardBounds.of(dataclasses.replace(PRESETS["tiny-llama"], **changes), 2)


@pytest.mark.parametrize("value", [0, -1, 65, 2.0, True, "2", None])
def test_a_bad_number_of_processes_is_refused(value):
    with pytest.raises(ValueError, match=r"^tensor_parallel: expected an integer from 1 to 64"):
        Engine("random:tiny-llama", device="cpu", tensor_parallel=value)


def test_more_processes_than_heads_are_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr("specengine.tensor_parallel.rank_processes.subprocess.Popen", None)
    with pytest.raises(ValueError, match="3 processes cannot share 2 key/value heads"):
        Engine("random:tiny-llama", device="cpu", tensor_parallel=3)


def test_ops_that_the_other_processes_do_not_have_are_refused():
    with pytest.raises(ValueError, match=r"^tensor_parallel: the other processes have the kernels of a device"):
        load_model("random:tiny-llama", device="cpu", tensor_parallel=2, ops=reference)


def test_a_loaded_model_keeps_its_number():
    with pytest.raises(ValueError, match=r"^tensor_parallel: this model was loaded with 1, got 2"):
        Engine(tiny_model(), drafter="none", tensor_parallel=2)
    assert open_checkpoint("random:tiny-llama").config.num_kv_heads == 2
