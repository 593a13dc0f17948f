"""Numbers with and without memory, against a set of them."""

from random import Random

from specengine.cache.free_list import FreeList


def test_a_list_knows_what_has_memory_in_any_order_of_calls():
    draw = Random(5)
    for _ in range(200):
        free, owned, memory = FreeList(12), set(), set()
        for _ in range(30):
            match draw.randrange(3):
                case 0:
                    taken = free.take(draw.randint(0, len(free)))
                    assert len({*taken}) == len(taken) and owned.isdisjoint(taken)
                    owned, memory = owned.union(taken), memory.union(taken)
                case 1:
                    given = draw.sample(sorted(owned), draw.randint(0, len(owned)))
                    free.give_back(given)
                    owned -= {*given}
                case 2:
                    unused, keep = memory - owned, draw.randrange(4)
                    stripped = free.strip(keep)
                    assert stripped == sorted(unused.intersection(stripped))
                    assert len(unused) - len(stripped) == min(keep, len(unused))
                    memory -= {*stripped}
            assert (len(free), free.with_memory) == (12 - len(owned), len(memory))
