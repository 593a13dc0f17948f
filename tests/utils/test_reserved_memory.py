"""Memory goes back to the system without a byte of the neighbours."""

import mmap
from itertools import product

import torch

from specengine.utils.reserved_memory import ReservedArray

PAGE = mmap.PAGESIZE


def test_a_released_part_is_unwritten_and_all_around_it_stays():
    array = ReservedArray("bytes", (6 * PAGE,), torch.uint8)
    near = (0, 1, PAGE - 1, PAGE, PAGE + 1)
    for first, size in product(near, (*near, 2 * PAGE, 3 * PAGE + 5)):
        array.tensor.fill_(7)
        array.release(array.tensor[first : first + size])
        whole = range(-(-first // PAGE), (first + size) // PAGE)  # pages of the system
        for page in range(6):
            assert array.tensor[page * PAGE : (page + 1) * PAGE].unique().tolist() == [0 if page in whole else 7]
