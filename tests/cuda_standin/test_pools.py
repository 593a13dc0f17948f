"""Private memory pools: use counts, live blocks, reuse."""

import torch

from tests.cuda_standin.allocator import DEFAULT_POOL
from tests.cuda_standin.device import CUDA


def test_a_pool_whose_graphs_are_gone_takes_no_capture_while_a_block_of_it_lives(device, capture, x):
    pool, held = torch.cuda.graph_pool_handle(), []
    graph = capture(lambda: held.append(x + 1), pool)
    del graph
    with device.refusals.expected(r"use_count > 0"):
        capture(lambda: x + 2, pool)


def test_a_pool_lives_on_with_one_of_its_graphs_or_begins_anew_without_blocks(device, capture, x):
    pool, held = torch.cuda.graph_pool_handle(), []
    first = capture(lambda: held.append(x + 1), pool)
    second = capture(lambda: held.append(x + 2), pool)
    del first
    third = capture(lambda: held.append(x + 3), pool)
    del second, third
    held.clear()
    again = capture(lambda: held.append(x + 4), pool)  # its entry emptied the cache
    again.replay()
    assert held[0].tolist() == [value + 4 for value in range(8)]


def test_dead_memory_of_a_pool_serves_its_next_capture_and_live_memory_does_not(device, capture, x):
    pool, held = torch.cuda.graph_pool_handle(), []
    graphs = [capture(lambda: held.append((x + 1) + 2), pool)]  # x + 1 is dead at the end
    reserved = device.allocator.pools[pool].reserved
    graphs.append(capture(lambda: x + 3, pool))
    assert device.allocator.pools[pool].reserved == reserved
    graphs.append(capture(lambda: held.append(x + 4), pool))
    graphs.append(capture(lambda: held.append(x + 5), pool))
    assert device.allocator.pools[pool].reserved > reserved
    for graph in graphs:
        graph.replay()
    assert [out[0].item() for out in held] == [3, 4, 5]


def test_a_graph_overwrites_what_it_returned_to_its_pool(device, capture, x):
    """The control of the reuse: an output that was dropped belongs to the next graph, and both write there."""
    pool, outs = torch.cuda.graph_pool_handle(), []
    first = capture(lambda: outs.append(x + 1), pool)
    outs.clear()
    second = capture(lambda: outs.append(x + 2), pool)
    second.replay()
    assert outs[0][0].item() == 2
    first.replay()
    assert outs[0][0].item() == 1


def test_live_bytes_are_counted_by_block(device, capture):
    before = device.allocator.live
    held = torch.empty(1000, device=CUDA)
    view = held[10:]
    del held
    assert device.allocator.live - before == 4096
    del view
    assert device.allocator.live == before


def test_memory_outside_of_the_pool_is_refused_during_a_capture(device, capture, x):
    def beside() -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.empty(3, device=CUDA)

    with device.refusals.expected(r"outside of the captured graph's pool"):
        capture(beside)
    beside()
    assert device.allocator.pools[DEFAULT_POOL].live > 0


def test_a_graph_whose_inputs_were_freed_does_not_run(device, capture):
    inputs = [torch.ones(4, device=CUDA)]
    graph = capture(lambda: inputs[0] + 1)
    graph.replay()
    inputs.clear()
    with device.refusals.expected(r"was freed after the capture"):
        graph.replay()
