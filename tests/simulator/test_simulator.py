"""The execution simulator: it finds planted bugs, lets correct kernels pass, and its device language computes right."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.selection import wide

pytestmark = pytest.mark.sim

# The simulator's message about each planted kernel (csrc/sim/planted.h) when its bug is switched on.
PLANTED = {
    "missing_barrier": r"race: read of 4 bytes|uninitialised shared memory",
    "missing_second_barrier": r"race: (read|write) of 4 bytes of shared memory at byte \d+ of rows",
    "missing_warp_barrier": r"race: read of 4 bytes|uninitialised shared memory",
    "warp_barrier_of_others": r"race: read of 4 bytes|uninitialised shared memory",
    "shuffle_as_barrier": r"race: read of 4 bytes of shared memory at byte \d+ of rows \(256 bytes\), which thread "
    r"\(\d+,0,0\) has written, with no __syncthreads or __syncwarp between",
    "bytes_without_barrier": r"race: read of 1 bytes|uninitialised shared memory",
    "unprotected_sum": r"race: (read|write) of 4 bytes of shared memory at byte 0 of sum",
    "sum_read_too_early": r"race: (read|atomic operation) of 4 bytes of shared memory at byte 0 of sum",
    "uninitialised_read": r"thread \(40,0,0\): read of 4 bytes of uninitialised shared memory at byte 160 of rows",
    "shared_overrun": r"thread \(63,0,0\): out-of-bounds write of 4 bytes of shared memory, 0 bytes after the end of",
    "dynamic_shared_overrun": r"thread \(63,0,0\): out-of-bounds write .* 0 bytes after the end of dynamic shared",
    "global_overrun": r"thread \(63,0,0\): out-of-bounds write of 4 bytes, 0 bytes after the end of out \(256 bytes\)",
    "global_read_overrun": r"thread \(0,0,0\): out-of-bounds read of 4 bytes, 4 bytes before in \(256 bytes\)",
    "copy_overrun": r"thread \(0,0,0\): out-of-bounds read of 260 bytes",
    "prefetch_overrun": r"thread \(63,0,0\): prefetch 0 bytes after the end of in \(256 bytes\)",
    "wild_address": r"out-of-bounds read of 4 bytes, \d+ bytes after the end of",
    "array_overrun": r"index \d is outside its array",
    "misaligned_vector": r"misaligned access: the address ends in 4 of 16",
    "misaligned_shared_vector": r"misaligned access",
    "divergent_barrier": r"divergent barrier: waits at __syncthreads .*, others at __syncthreads",
    "barrier_against_shuffle": r"waits at __syncthreads .* waits at __shfl_xor_sync",
    "absent_lane": r"__shfl_xor_sync.* names lane 5, which has exited|exits, but __shfl_xor_sync waits for it",
    "mask_without_caller": r"__any_sync: mask 0x00000001 leaves out the calling lane",
    "different_masks": r"__shfl_sync with mask 0x\w+ while lane \d+ waits for this lane at __shfl_sync with mask 0x\w+",
    "lane_outside_mask": r"__shfl_sync: reads lane \d+, which the mask leaves out",
    "forgotten_wait": r"which an asynchronous copy not yet waited for writes",
    "wait_for_too_few": r"which an asynchronous copy not yet waited for writes",
    "wait_without_barrier": r"race: read of 4 bytes|uninitialised shared memory|not yet waited for",
    "forgotten_previous_kernel": r"read of 4 bytes at byte \d+ of in \(256 bytes\) before wait_for_previous_kernel\(\)",
    "too_far_shift": r"shift by \d+ bits",
    "too_many_threads": r"a block of \(1088,1,1\) threads",
    "no_blocks": r"a grid of \(0,1,1\) blocks",
    "too_many_rows_of_blocks": r"a grid of \(1,65536,1\) blocks",
    "different_writes": r"race: write of 4 bytes of shared memory at byte 0 of same .* has written",
    "global_without_barrier": r"race: (read|write) of 4 bytes at byte \d+ of out \(256 bytes\), which thread \(",
    "constant_load_of_own_output": r"a load for constant memory at byte 0 of out \(256 bytes\), which this launch",
    "missing_fence": r"race: read of 4 bytes at byte \d of out \(256 bytes\), which block \(\d,0,0\) thread "
    r"\(0,0,0\) has written, with no __threadfence, atomic operation and barrier between",
    "missing_fence_behind": r"race: read of 4 bytes at byte \d of out .* which block \(\d,0,0\) thread \(0,0,0\) has",
    "fence_of_another_thread": r"race: read of 4 bytes .* block \(\d,0,0\) thread \(40,0,0\) has written, with no __th",
    "no_arrival": r"race: (read|write) of 4 bytes .* which block .* has (read|written)",
    "reads_ahead": r"race: (read|write) of 4 bytes at byte 4 of out .* which block \(\d,0,0\) thread \([07],0,0\) has",
    "reads_before_the_last_arrival": r"race: (read|write) of 4 bytes .* which block .* has (read|written|changed)",
    "missing_reset": r"arrived is not zero after the launch",
    "expects_too_many": r"arrived is not zero after the launch",
    "blocks_overlap": r"race: write of 4 bytes at byte \d+ of out .* which block \(\d,0,0\) thread \(\d+,0,0\) has wri",
    "host_read": r"in is read on the host",
    "too_much_shared_memory": r"233472 bytes of dynamic shared memory, more than 227 KiB",
}
OF_THE_LAUNCH = ("too_many_threads", "no_blocks", "too_many_rows_of_blocks", "too_much_shared_memory", "host_read")
OF_THE_LAUNCH += ("missing_reset", "expects_too_many")


in_schedules = pytest.mark.parametrize("schedules", wide([range(3), range(20)]), ids=["three", "twenty"])


def run_planted(simulated, name: str, *, broken: bool) -> torch.Tensor:
    # In the middle of larger ones: what lies beside the tensors is readable memory, so only the simulator objects.
    around = torch.arange(192, dtype=torch.float32), torch.zeros(192)
    simulated.planted(name, around[0][64:128], around[1][64:128], broken)
    return around[1][64:128]


def probe(simulated, name: str, values: torch.Tensor, *shape: int, dtype=torch.int32) -> torch.Tensor:
    out = torch.full(shape, -77, dtype=dtype)
    simulated.probe(name, values, out)
    return out


@in_schedules
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_and_located_in_every_schedule(simulated, name, schedules):
    for seed in schedules:
        simulated.set_schedule(seed)
        with pytest.raises(RuntimeError, match=PLANTED[name]) as error:
            run_planted(simulated, name, broken=True)
        located = r"block \(\d,0,0\) thread \(\d+,0,0\): .*planted(_memory|_blocks)?\.cu:\d+"
        place = "" if name in OF_THE_LAUNCH else located
        assert re.match(f"simulator: planted: {place}", str(error.value)), error.value


@in_schedules
@pytest.mark.parametrize("name", PLANTED)
def test_its_correct_twin_passes_in_every_schedule(simulated, name, schedules):
    results = []
    for seed in schedules:
        simulated.set_schedule(seed)
        results.append(run_planted(simulated, name, broken=False))
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].any()


def test_a_wait_for_what_cannot_come_is_ended(simulated):
    with pytest.raises(RuntimeError, match="no end in sight"):
        run_planted(simulated, "endless_wait", broken=True)


def test_a_launch_after_a_finding_is_not_affected_by_it(simulated):
    with pytest.raises(RuntimeError):
        run_planted(simulated, "barrier_against_shuffle", broken=True)
    assert torch.equal(run_planted(simulated, "global_overrun", broken=False), torch.arange(64.0, 128.0))


def test_launches_of_several_threads_follow_each_other(simulated):
    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(run_planted, simulated, "missing_second_barrier", broken=i % 5 == 0) for i in range(100)]
        failures = [job.exception() for job in jobs]
    assert all(isinstance(failure, RuntimeError) == (i % 5 == 0) for i, failure in enumerate(failures))


def test_a_schedule_is_repeated_by_its_seed(simulated):
    def order(seed: int) -> str:
        simulated.set_schedule(seed)
        with pytest.raises(RuntimeError) as error:
            run_planted(simulated, "missing_second_barrier", broken=True)
        return str(error.value)

    assert order(3) == order(3)
    assert len({order(seed) for seed in range(20)}) > 5


def shuffled(kind: int, mask: int, by: int, width: int, values: list[int]) -> list[int]:
    """CUDA's four shuffles: index (by + lane), up, down, xor."""
    result = []
    for lane, value in enumerate(values):
        if not mask >> lane & 1:
            result.append(-77)
            continue
        first = lane // width * width
        last = first + width - 1
        if kind == 0:
            source = first + (by + lane) % width
        elif kind == 1:
            source = lane - by if lane - by >= first else lane
        elif kind == 2:
            source = lane + by if lane + by <= last else lane
        else:
            source = lane ^ by if lane ^ by <= last else lane
        result.append(values[source] if source != lane else value)
    return result


@pytest.mark.parametrize("kind", range(4), ids=["index", "up", "down", "xor"])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_shuffles_move_values_within_segments(simulated, kind, width):
    values = torch.randint(-(2**31), 2**31, (32,), generator=torch.Generator().manual_seed(width)).tolist()
    for by in (0, 1, 3, 5, 8, 16, 31):
        arguments = torch.tensor([kind, -1, by, width, *values], dtype=torch.int32)
        assert probe(simulated, "shuffle", arguments, 32).tolist() == shuffled(kind, 2**32 - 1, by, width, values)


def test_a_shuffle_of_half_a_warp_leaves_the_other_half_alone(simulated):
    values = list(range(100, 132))
    arguments = torch.tensor([3, 0xFFFF, 5, 16, *values], dtype=torch.int32)
    assert probe(simulated, "shuffle", arguments, 32).tolist() == shuffled(3, 0xFFFF, 5, 16, values)


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x80000001, 0x0F0F0F0F, 0x00000010])
@pytest.mark.parametrize("spread", [1, 2, 3, 2**30])
def test_votes_matches_and_reductions_see_the_lanes_of_the_mask(simulated, mask, spread):
    values = torch.randint(-spread, spread, (32,), generator=torch.Generator().manual_seed(spread)).tolist()
    signed = [mask - 2**32 if mask >= 2**31 else mask, *values]
    got = probe(simulated, "votes", torch.tensor(signed, dtype=torch.int32), 11, 32).long() & 0xFFFFFFFF
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    mine = [values[lane] for lane in lanes]

    def bits(chosen) -> int:
        return sum(1 << lane for lane in chosen)

    conjunction, disjunction, difference = -1, 0, 0
    for value in mine:
        conjunction, disjunction, difference = conjunction & value, disjunction | value, difference ^ value
    same = [bits(lane for lane in lanes if values[lane] == value) for value in mine]
    everywhere = [
        *[[bits(lane for lane in lanes if values[lane])] * len(lanes), [any(mine)] * len(lanes)],
        *[[all(mine)] * len(lanes), same, same],
        *[[x] * len(lanes) for x in (sum(mine), min(mine), max(mine), conjunction, disjunction, difference)],
    ]
    assert got[:, lanes].tolist() == [[int(x) & 0xFFFFFFFF for x in row] for row in everywhere]
    assert (got[:, [lane for lane in range(32) if lane not in lanes]] == (-77 & 0xFFFFFFFF)).all()


@in_schedules
def test_lanes_that_went_apart_meet_among_themselves(simulated, schedules):
    values = torch.arange(1, 33, dtype=torch.int32)
    even, odd = int(values[::2].sum()), int(values[1::2].sum())
    expected = [odd if lane % 2 else even * (8 if lane < 16 else 1) for lane in range(32)]
    for seed in schedules:
        simulated.set_schedule(seed)
        assert probe(simulated, "apart", values, 32).tolist() == expected


@pytest.mark.parametrize("ones", [0, 1, 95, 96])
def test_barriers_that_vote_and_block_reductions_see_the_whole_block(simulated, ones):
    values = torch.zeros(96, dtype=torch.int32)
    values[:ones] = 3
    expected = [int(ones == 96), int(ones > 0), ones, 3 * ones, 3 * int(ones > 0)]
    assert probe(simulated, "block_votes", values, 5, 96).tolist() == [[value] * 96 for value in expected]


@in_schedules
def test_atomics_lose_no_update(simulated, schedules):
    values = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:120].int()
    for seed in schedules:
        simulated.set_schedule(seed)
        out = torch.zeros(12, dtype=torch.int32)
        out[2] = 10**6
        simulated.probe("atomics", values, out)
        union = 0
        for value in values.tolist():
            union |= value
        assert out[:4].tolist() == [int(values.sum()), int(values.max()), int(values.min()), union]
        assert out[4:5].view(torch.float32).item() == 60 and out[8:10].view(torch.float64).item() == 30
        assert out[6:8].tolist() == [0, int(values.max())]
        assert out[10:].tolist() == [120, 40]


@in_schedules
def test_the_last_block_to_arrive_sees_what_all_have_written(simulated, schedules):
    for seed in schedules:
        simulated.set_schedule(seed)
        out = torch.zeros(9, dtype=torch.int32)
        simulated.probe("last_block", torch.arange(1, 8, dtype=torch.int32), out)
        assert out.tolist() == [*range(1, 8), 28, 0]


@pytest.mark.parametrize("name, dtype", [("half", torch.float16), ("bfloat16", torch.bfloat16)])
def test_the_matrix_product_is_that_of_float64(simulated, name, dtype):
    generator = torch.Generator().manual_seed(5)
    a, b, c = (torch.randn(shape, generator=generator) for shape in ((16, 16), (16, 8), (16, 8)))
    out = probe(simulated, f"product_{name}", torch.cat([a.flatten(), b.flatten(), c.flatten()]), 16, 8, dtype=a.dtype)
    expected = c.double() + a.to(dtype).double() @ b.to(dtype).double()
    assert (out - expected).norm() / expected.norm() < 1e-6


def test_matrices_are_loaded_plain_and_transposed(simulated):
    elements = torch.arange(256, dtype=torch.int16) * 7 + 3
    plain, transposed = (
        probe(simulated, "matrices", elements.view(torch.int32), 2, 32, 4).view(torch.int16).view(2, 32, 4, 2)
    )
    matrix = elements.view(4, 8, 8)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        assert torch.equal(plain[lane], matrix[:, g, 2 * t : 2 * t + 2])
        assert torch.equal(transposed[lane], matrix[:, 2 * t : 2 * t + 2, g])


def test_every_16_bit_pattern_widens_as_in_torch(simulated):
    patterns = torch.arange(65536, dtype=torch.int32)
    out = probe(simulated, "widen", patterns, 2, 65536).view(torch.float32)
    for row, dtype in zip(out, (torch.float16, torch.bfloat16), strict=True):
        expected = patterns.to(torch.int16).view(dtype).float()
        same = (row.view(torch.int32) == expected.view(torch.int32)) | (row.isnan() & expected.isnan())
        assert same.all()


def nearby(patterns: torch.Tensor) -> torch.Tensor:
    """float32 patterns: a step to each side of `patterns`, themselves, and random ones."""
    random = torch.randint(-(2**31), 2**31, (65536,), generator=torch.Generator().manual_seed(9))
    return torch.cat([patterns - 1, patterns, patterns + 1, random]).int()


def test_floats_narrow_to_16_bits_as_in_torch(simulated):
    all16 = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    half = all16.view(torch.float16).float().view(torch.int32).long()
    bfloat = all16.view(torch.bfloat16).float().view(torch.int32).long()
    # The numbers themselves and those halfway between two of them, where rounding to even decides.
    patterns = torch.cat([nearby(half), nearby(half + (1 << 12)), nearby(bfloat), nearby(bfloat + (1 << 15))])
    for block in patterns.split(65536):
        out = probe(simulated, "narrow", block, 2, 65536).to(torch.int16)
        for row, dtype in zip(out, (torch.float16, torch.bfloat16), strict=True):
            got, expected = row.view(dtype), block.view(torch.float32).to(dtype)
            same = (got.view(torch.int16) == expected.view(torch.int16)) | (got.isnan() & expected.isnan())
            assert same.all()


def test_bit_functions_agree_with_integers(simulated):
    words = torch.randint(-(2**31), 2**31, (64,), generator=torch.Generator().manual_seed(2))
    words[:4] = torch.tensor([0, -1, 1, -(2**31)])
    got = probe(simulated, "bits", words.int(), 9, 64).T.long() & 0xFFFFFFFF

    def bytes_of(x: int) -> list[int]:
        return list((x & 0xFFFFFFFF).to_bytes(4, "little"))

    def signed(byte: int) -> int:
        return byte - 256 if byte > 127 else byte

    for t, row in enumerate(got.tolist()):
        x, y = int(words[t]) & 0xFFFFFFFF, int(words[(t + 1) % 64]) & 0xFFFFFFFF
        both, by = y << 32 | x, t % 32
        expected = [
            *[x.bit_count(), 32 - x.bit_length(), (x & -x).bit_length(), int(f"{x:032b}"[::-1], 2), x * y >> 32],
            int.from_bytes(bytes([bytes_of(x)[0], bytes_of(x)[2], bytes_of(y)[0], bytes_of(y)[2]]), "little"),
            *[(both << by >> 32) & 0xFFFFFFFF, (both >> by) & 0xFFFFFFFF],
            (7 + sum(signed(a) * signed(b) for a, b in zip(bytes_of(x), bytes_of(y), strict=True))) & 0xFFFFFFFF,
        ]
        assert row == expected


def test_a_softmax_over_a_vocabulary_is_quick_and_right(simulated):
    logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(3))
    out = probe(simulated, "softmax", logits, 4, 49152, dtype=torch.float32)
    assert torch.allclose(out, logits.softmax(1), rtol=1e-4, atol=1e-9)
