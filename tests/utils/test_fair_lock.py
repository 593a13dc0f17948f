import threading
import time

from specengine.utils.fair_lock import FairLock


def waits(turns: FairLock, count: int) -> None:
    while len(turns._waiting) < count:
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
