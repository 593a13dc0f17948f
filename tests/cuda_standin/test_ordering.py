"""Streams, events and pinned memory: who may use what, and when."""

import pytest
import torch

from tests.cuda_standin.device import CUDA


@pytest.fixture
def other(device):
    return torch.cuda.Stream()


def test_a_stream_that_does_not_wait_may_not_read_what_another_one_writes(device, x, other):
    with device.refusals.expected(r"another stream may still be using"), torch.cuda.stream(other):
        x + 1


@pytest.mark.parametrize("how", ["stream", "event", "host", "device"])
def test_a_stream_that_waits_may(device, x, other, how):
    if how == "stream":
        other.wait_stream(torch.cuda.current_stream())
    elif how == "event":
        event = torch.cuda.Event()
        event.record()
        other.wait_event(event)
    elif how == "host":
        torch.cuda.current_stream().synchronize()
    else:
        torch.cuda.synchronize()
    with torch.cuda.stream(other):
        y = x + 1
    torch.cuda.synchronize()
    assert y[0].item() == 1


def test_nobody_overwrites_what_another_stream_reads(device, x, other):
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        y = x + 1
    with device.refusals.expected(r"another stream may still be using"):
        x.zero_()
    torch.cuda.synchronize()
    x.zero_()
    del y


def test_memory_is_not_freed_while_another_stream_uses_it(device, other):
    def use(waits: bool) -> None:
        x = torch.ones(4, device=CUDA)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            y = x + 1
        if waits:
            torch.cuda.current_stream().wait_stream(other)
        del x, y

    use(waits=True)
    with device.refusals.expected(r"is freed for its own stream"):
        use(waits=False)


def test_the_host_reads_pinned_memory_after_the_event_alone(device, x):
    pinned, event = torch.zeros(8, pin_memory=True), torch.cuda.Event()
    pinned.copy_(x, non_blocking=True)
    event.record()
    with device.refusals.expected(r"the host uses memory"):
        pinned.tolist()
    event.synchronize()
    assert pinned[2:4].tolist() == [2, 3]


def test_the_host_does_not_write_pinned_memory_that_the_device_reads(device, x):
    pinned = torch.zeros(8, pin_memory=True)
    x.copy_(pinned, non_blocking=True)
    with device.refusals.expected(r"the host uses memory"):
        pinned += 1
    torch.cuda.synchronize()
    pinned += 1


def test_an_event_inside_a_graph_needs_to_be_external_to_have_a_time(device, capture, x):
    def run(external: bool):
        events = [torch.cuda.Event(enable_timing=True, external=external) for _ in range(2)]

        def timed() -> None:
            events[0].record()
            x.add_(1)
            events[1].record()

        capture(timed).replay()
        return events

    begin, end = run(external=True)
    with device.refusals.expected(r"the host has not waited"):
        begin.elapsed_time(end)
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 0
    begin, end = run(external=False)
    with device.refusals.expected(r"has no time"):
        begin.elapsed_time(end)


def test_tensors_of_two_devices_do_not_meet(device, x):
    with pytest.raises(RuntimeError, match="on one device"):
        x + torch.ones(8)
    assert (x + torch.tensor(1.0)).tolist()[0] == 1
