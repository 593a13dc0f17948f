import signal
import sys
import threading
import time

import pytest

from specengine.utils import fair_lock
from specengine.utils.fair_lock import FairLock


def waits(turns: FairLock, count: int) -> None:
    while turns.num_waiting < count:
        time.sleep(0.001)


def test_the_longest_waiting_thread_is_next_even_if_the_holder_comes_back_at_once():
    turns, order = FairLock(), []

    def work(name: str) -> None:
        with turns:
            order.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "bcd"]
    with turns:
        for i, thread in enumerate(threads):
            thread.start()
            waits(turns, i + 1)
    with turns:
        order.append("a again")
    for thread in threads:
        thread.join()
    assert order == ["b", "c", "d", "a again"]


def test_only_one_thread_holds_it():
    turns, inside, most = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(300):
            with turns:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and inside == 0


def test_an_exception_inside_hands_the_turn_on():
    turns = FairLock()
    try:
        with turns:
            raise RuntimeError
    except RuntimeError:
        pass
    with turns:
        pass


def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue():
    turns, held, done = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            held.set()
            waits(turns, 1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    with pytest.raises(KeyboardInterrupt), turns:
        pass
    assert turns.num_waiting == 0
    done.set()
    thread.join()
    with turns:
        pass


@pytest.mark.parametrize("line", range(20))
def test_the_thread_of_an_exception_at_any_line_of_the_lock_gets_it_again(line):
    turns, left = FairLock(), line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != fair_lock.__file__:
            return None
        left -= event == "line"
        if left < 0 and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with turns:
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    assert left < 0
    with turns:
        assert turns.num_waiting == 0
