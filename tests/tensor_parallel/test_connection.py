"""A connection delivers the bytes that were sent, or raises an error in time."""

import socket
import struct
import threading
import time

import pytest
import torch

from specengine.tensor_parallel.connection import Connection
from specengine.tensor_parallel.messages import DropCaches, Failed, Ready, encode_message, encode_rows


@pytest.fixture
def ends():
    sockets = socket.socketpair()
    yield [Connection(end) for end in sockets]
    for end in sockets:
        end.close()


def test_messages_and_rows_arrive_whole_and_in_order(ends):
    first, other = ends
    x = torch.randn(300, 700)  # more than a socket holds

    def send():
        for data in (encode_message(Ready()), encode_rows(x), encode_message(DropCaches((1, 2))), encode_rows(x[:1])):
            other.send(data)

    thread = threading.Thread(target=send)
    thread.start()
    assert first.receive() == Ready()
    assert torch.equal(first.receive_rows(300, 700), x)
    assert first.receive() == DropCaches((1, 2))
    assert torch.equal(first.receive_rows(1, 700), x[:1])
    thread.join()


def test_a_closed_end_is_an_error(ends):
    first, other = ends
    other.send(encode_message(Ready())[:-1])  # it ended within a message
    other.close()
    with pytest.raises(ConnectionError, match="closed"):
        first.receive()
    with pytest.raises(ConnectionError, match="closed"):
        first.receive_rows(1, 1)
    with pytest.raises(ConnectionError):
        first.send(encode_message(Ready()))


@pytest.mark.parametrize("receive", [Connection.receive, lambda end: end.receive_rows(4, 2)])
def test_a_failure_is_recorded_wherever_it_arrives(ends, receive):
    first, other = ends
    other.send(encode_message(Failed("no memory")))
    with pytest.raises(ConnectionError, match="no memory"):
        receive(first)
    assert first.failure == "no memory"


def test_an_unexpected_message_is_an_error(ends):
    first, other = ends
    other.send(encode_message(Ready()))
    with pytest.raises(ConnectionError, match="rows were due"):
        first.receive_rows(1, 1)
    other.send(encode_rows(torch.ones(1, 1)))
    with pytest.raises(ConnectionError, match="message was due"):
        first.receive()
    other.send(encode_rows(torch.ones(1, 2)))
    with pytest.raises(ConnectionError, match="8 bytes of rows, expected 4"):
        first.receive_rows(1, 1)


def test_no_call_waits_longer_than_the_timeout(ends):
    first, _ = ends
    first.set_timeout(0.2)
    for wait in (first.receive, lambda: first.receive_rows(1, 1), lambda: first.send(bytes(1 << 24))):
        begin = time.monotonic()
        with pytest.raises(BlockingIOError):
            wait()
        assert 0.1 < time.monotonic() - begin < 10
    assert struct.calcsize("ll") == 16  # what the system's struct timeval has


def test_a_failure_is_found_behind_rows_and_a_truncated_header_is_none():
    for said, word in ((encode_rows(torch.ones(1, 2)) + encode_message(Failed("no room")), "no room"), (b"\0", "")):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(said)
            theirs.close()
            connection = Connection(ours)
            connection.find_failure()
            assert connection.failure == word
