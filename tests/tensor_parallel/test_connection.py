"""What comes out of a connection is what went in, or an error; it never waits longer than it may."""

import socket
import struct
import threading
import time

import pytest
import torch

from specengine.tensor_parallel.connection import Connection, Failed, Forget, Ready, framed, framed_rows


@pytest.fixture
def ends():
    sockets = socket.socketpair()
    yield [Connection(end) for end in sockets]
    for end in sockets:
        end.close()


def test_messages_and_rows_arrive_whole_and_in_order(ends):
    first, other = ends
    x = torch.randn(300, 700)  # more than a socket holds

    def speak():
        for data in (framed(Ready()), framed_rows(x), framed(Forget((1, 2))), framed_rows(x[:1])):
            other.send(data)

    thread = threading.Thread(target=speak)
    thread.start()
    assert first.receive() == Ready()
    assert torch.equal(first.receive_rows(300, 700), x)
    assert first.receive() == Forget((1, 2))
    assert torch.equal(first.receive_rows(1, 700), x[:1])
    thread.join()


def test_an_end_that_is_gone_is_an_error(ends):
    first, other = ends
    other.send(framed(Ready())[:-1])  # it died in the midst of a word
    other.close()
    with pytest.raises(ConnectionError, match="gone"):
        first.receive()
    with pytest.raises(ConnectionError, match="gone"):
        first.receive_rows(1, 1)
    with pytest.raises(ConnectionError):
        first.send(framed(Ready()))


@pytest.mark.parametrize("receive", [Connection.receive, lambda end: end.receive_rows(4, 2)])
def test_a_last_word_is_heard_wherever_it_comes(ends, receive):
    first, other = ends
    other.send(framed(Failed("no memory")))
    with pytest.raises(ConnectionError, match="no memory"):
        receive(first)
    assert first.last_word == "no memory"


def test_what_is_not_due_is_an_error(ends):
    first, other = ends
    other.send(framed(Ready()))
    with pytest.raises(ConnectionError, match="rows were due"):
        first.receive_rows(1, 1)
    other.send(framed_rows(torch.ones(1, 1)))
    with pytest.raises(ConnectionError, match="message was due"):
        first.receive()
    other.send(framed_rows(torch.ones(1, 2)))
    with pytest.raises(ConnectionError, match="8 bytes of rows, expected 4"):
        first.receive_rows(1, 1)


def test_nobody_is_waited_for_longer_than_the_limit(ends):
    first, _ = ends
    first.limit(0.2)
    for wait in (first.receive, lambda: first.receive_rows(1, 1), lambda: first.send(bytes(1 << 24))):
        begin = time.monotonic()
        with pytest.raises(BlockingIOError):
            wait()
        assert 0.1 < time.monotonic() - begin < 10
    assert struct.calcsize("ll") == 16  # what the system's struct timeval has


def test_a_last_word_is_heard_behind_rows_and_silence_is_none():
    for said, word in ((framed_rows(torch.ones(1, 2)) + framed(Failed("no room")), "no room"), (b"\0", "")):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(said)
            theirs.close()
            connection = Connection(ours)
            connection.hear_out()
            assert connection.last_word == word
