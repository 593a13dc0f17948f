"""Passes over prompts on a GPU: the host waits for nothing, and makes few calls for each layer."""

import pytest
import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.models import transformer
from specengine.ops import tree_attention
from tests.fake_cuda.mode import CUDA

PAGES = 64
LAYER = 9  # launches: four products, attention, two norms, the rotation and the gate
VIEWS = 16  # calls of a layer that start no kernel: memory for the outputs, transposed weights, rows of heads as rows
AROUND = 5  # launches outside of the layers: copies of the rows, of their places and of the chains, pages, first norm
VIEWS_AROUND = 18
HOST = 3.5e-6  # seconds of a launch on the host
DEEP = 32  # layers
PASSES = {
    "a chunk of 1,024 rows behind others": ([1024], [300]),
    "short prompts": ([20, 7, 60, 33, 1], [0, 64, 0, 130, 5]),
    "long and short ones": ([300, 20, 700], [70, 0, 129]),
}
MIXED = PASSES["long and short ones"]


def launches_of(machine, target, rows, lengths):
    """Runs a pass twice, and returns the launches of the second time, when nothing is set up any more."""
    target.ensure_positions(2048)
    cache = target.new_cache(PAGES)
    pages = [cache.allocate(length + count) for count, length in zip(rows, lengths, strict=True)]
    for _ in range(2):
        machine.device.waits.clear()
        machine.device.blocking_copies = 0
        with machine.device.counted() as launches:
            tree = TreeBatch.chains([[5] * count for count in rows], CUDA)
            target.hidden_states(tree, cache, cache.batch(pages, lengths))
    return launches


def waited(machine):
    """How often the host waited."""
    return len(machine.device.waits) + machine.device.blocking_copies


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_waits_for_nothing_and_makes_few_calls_a_layer(machine, name):
    target = machine.target(by_library=True)
    two, one = (launches_of(machine, each, *PASSES[name]) for each in (target, target.first_layers(1)))
    assert target.config.num_layers == 2 and waited(machine) == 0
    assert two.total - one.total == LAYER and two.views.total() - one.views.total() <= VIEWS
    assert one.total <= LAYER + AROUND and one.views.total() <= VIEWS + VIEWS_AROUND
    assert two.ours["tensor_attention"] == 2 and two.torch["mm"] == 8


def test_the_launches_of_a_chunk_take_the_host_a_millisecond():
    assert (DEEP * LAYER + AROUND) * HOST < 1.05e-3


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-mistral"])
def test_sinks_and_windows_have_one_launch_of_attention_a_layer_too(machine, name):
    target = machine.target(by_library=True, name=name)
    launches = launches_of(machine, target, *MIXED)
    assert launches.ours["tensor_attention"] == target.config.num_layers and waited(machine) == 0
    assert launches.torch["index_select"] == 1  # of pages, once a pass


def test_chains_that_the_host_does_not_know_are_a_planted_wait(machine, monkeypatch):
    monkeypatch.setattr(transformer, "chains_of", lambda tree, batch: None)
    launches_of(machine, machine.target(by_library=True), *MIXED)
    assert waited(machine) == 4  # two reads a layer


def test_a_planted_copy_that_blocks_is_counted(machine, monkeypatch):
    slow = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **_: slow(tensor, device))
    launches_of(machine, machine.target(by_library=True), *MIXED)
    assert waited(machine) == 3  # the rows, their places and the chains


def test_only_the_chain_with_much_to_multiply_has_calls_of_its_own(machine, monkeypatch):
    target, lengths = machine.target(by_library=True), []
    usual = launches_of(machine, target, *MIXED).total
    monkeypatch.setattr(tree_attention, "LIBRARY_FROM", 700 * 400 * target.config.num_heads * target.config.head_dim)
    monkeypatch.setattr(tree_attention, "causal_attention", lambda q, *_: lengths.append(len(q)) or torch.zeros_like(q))
    launches = launches_of(machine, target, *MIXED)
    assert lengths == [700] * 4 and waited(machine) == 0  # two passes of two layers
    assert launches.ours["tensor_attention"] == 2 and launches.total > usual
