import contextlib
import os
import signal
import threading

import pytest

from specengine.utils.interrupts import SIGNALS, DeferredSignals


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_runs_at_the_end_and_where_it_is_allowed(number):
    ran = []
    before = signal.signal(number, lambda *_: ran.append(1))
    with DeferredSignals() as signals:
        signal.raise_signal(number)
        assert not ran and signals.pending
        with DeferredSignals():
            signal.raise_signal(number)
        assert len(ran) == 0
        with signals.allowed():
            assert len(ran) == 2
            signal.raise_signal(number)
            assert len(ran) == 3
        signal.raise_signal(number)
        assert len(ran) == 3
    assert len(ran) == 4 and not signals.pending
    signal.signal(number, before)


def test_a_second_interrupt_waits_for_the_end_of_what_the_first_one_ends():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals() as signals:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            with signals.allowed():
                raise AssertionError
        finally:
            done.append(1)
            signal.raise_signal(signal.SIGINT)
            done.append(2)
    assert done == [1, 2]


def test_handlers_that_python_does_not_run_and_other_threads_are_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    found = []

    def other() -> None:
        with DeferredSignals():
            found.append(signal.getsignal(signal.SIGINT))

    with DeferredSignals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert found == [signal.SIG_IGN]


def test_a_handler_that_raises_while_handlers_are_exchanged_leaves_them_in_their_places(monkeypatch):
    """SIGALRM raises within each of the exchanges in turn."""

    def ring(*_) -> None:
        raise TimeoutError

    before, exchange = signal.signal(signal.SIGALRM, ring), signal.signal
    for number in range(8):
        left, signals = number, DeferredSignals()

        def counted(*arguments):
            nonlocal left
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGALRM)  # noted, or raised at once
            return exchange(*arguments)

        with monkeypatch.context() as patch, contextlib.suppress(TimeoutError):
            patch.setattr(signal, "signal", counted)
            with signals, signals.allowed():
                pass
        assert left < 0
        assert signal.getsignal(signal.SIGALRM) is ring and not signals.pending, number
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGALRM, before)
