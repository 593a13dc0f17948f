"""What a capture forbids: in its thread, on its stream, and to other threads."""

import threading

import pytest
import torch

from tests.cuda_standin.device import CUDA
from tests.cuda_standin.refusals import Refused

WAITS = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 3],
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "empty_cache": lambda x: torch.cuda.empty_cache(),
    "list": lambda x: x[[1, 2]],
    "pageable": lambda x: x.copy_(torch.ones(8), non_blocking=True),
    "tensor": lambda x: torch.tensor([1, 2], device=CUDA),
    "pinned": lambda x: torch.zeros(3, pin_memory=True),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_capture_neither_waits_nor_copies_pageable_memory(device, capture, x, name):
    with device.refusals.expected(r"capture"):
        capture(lambda: WAITS[name](x))
    WAITS[name](x)


def test_a_capture_runs_nothing_and_a_replay_runs_it_on_what_is_there_then(device, capture, x):
    out = torch.zeros(8, device=CUDA)
    graph = capture(lambda: out.copy_(x * 2))
    assert out.sum().item() == 0
    x += 1
    graph.replay()
    assert out.tolist() == [2 * value + 2 for value in range(8)]


def test_a_copy_from_pinned_memory_may_be_captured(device, capture, x):
    pinned = torch.zeros(8, pin_memory=True)
    graph = capture(lambda: x.copy_(pinned, non_blocking=True))
    pinned += 3
    graph.replay()
    assert x.tolist() == [3] * 8


def test_the_default_stream_and_other_modes_are_not_captured(device, x):
    for stream, mode in ((torch.cuda.default_stream(), "thread_local"), (torch.cuda.Stream(), "global")):
        graph = torch.cuda.CUDAGraph()
        with device.refusals.expected(r"capture_begin"), torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode=mode)


def test_one_capture_at_a_time(device, capture, x):
    def inner() -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")

    with device.refusals.expected(r"another capture is under way"):
        capture(inner)


def beside(device, capture, x, work) -> str | None:
    """Runs work in another thread while this one captures; returns what was refused there."""
    refused: list[str] = []

    def other() -> None:
        try:
            work()
        except Refused as error:
            refused.append(str(error))

    def run() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    capture(run)
    device.refusals.seen.clear()
    return refused[0] if refused else None


def test_other_threads_may_work_on_other_streams_alone(device, capture, x):
    def on_the_captured_stream() -> None:
        with torch.cuda.stream(capture.stream):
            x.add_(1)

    assert "another thread captures" in beside(device, capture, x, on_the_captured_stream)
    assert beside(device, capture, x, lambda: (torch.ones(3, device=CUDA) + 1).tolist()) is None


def test_other_threads_do_not_wait_for_the_whole_device_during_a_capture(device, capture, x):
    assert "is being captured" in beside(device, capture, x, torch.cuda.synchronize)
    assert "captures_underway" in beside(device, capture, x, torch.cuda.empty_cache)
    torch.cuda.synchronize()
