"""Microseconds of a kernel: the slowest of DRAM, L2, tensor cores, shared memory and latency, and the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specengine.bench.gpu_model.constants import Gpu
from specengine.bench.gpu_model.counts import Launch

SECTOR = 32
COPY = 16
PRODUCT = 2 * 16 * 8 * 16  # float operations of m16n8k16
WARP = 32
REGISTERS_AT_ONCE = 256  # that a warp gets
SYSTEM_SHARED = 1024  # bytes that each block takes beside its own
COUNTER = 4  # bytes, in which blocks count their arrivals
LAST_BLOCK_ROUNDS = 3  # of a last block: its fence, its arrival, the first bytes that it reads
# Tensors of one layer, which lie in DRAM when a kernel starts: other layers' have taken their place in L2.
COLD = ("weight", "k_cache", "v_cache")


@dataclass(frozen=True)
class KernelTime:
    """Holds the modelled time of a kernel, in microseconds, and the counts that matter for it.

    terms: what each resource alone would take; the largest is the kernel's bound.
    last_block_us: what the last blocks to arrive take behind all others.
    dram_bytes, l2_bytes: that the kernel moves.  launch: None for a library's kernel, which is not counted.
    occupancy: blocks of a multiprocessor at once.  waves: of blocks.
    """

    kernel: str
    us: float
    terms: dict[str, float]
    dram_bytes: float
    l2_bytes: float
    occupancy: int = 0
    waves: int = 0
    launch: Launch | None = None
    last_block_us: float = 0.0

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self.terms, key=self.terms.__getitem__)


def occupancy_of(launch: Launch, gpu: Gpu) -> int:
    """Returns how many blocks a multiprocessor holds at once. Raises ValueError where not even one fits."""
    warps = -(-launch.threads // WARP)
    registers = -(-launch.registers * WARP // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE * warps
    fits = min(
        gpu.blocks,
        gpu.threads // (warps * WARP),
        gpu.registers // registers,
        gpu.shared_bytes // (launch.shared_bytes + SYSTEM_SHARED),
    )
    if fits == 0:
        raise ValueError(f"gpu-model: no block of {launch.kernel} fits on a multiprocessor of {gpu.name}")
    return fits


def dram_bytes(launch: Launch, gpu: Gpu) -> int:
    """Returns the bytes between DRAM and L2: loads of cold tensors, and all of tensors larger than L2, once each."""
    large = sum(t.unique_bytes for name, t in launch.traffic() if name not in COLD and t.unique_bytes > gpu.l2_bytes)
    return large + sum(t.unique_bytes for name, t in launch.traffic("load", "uncached") if name in COLD)


def l2_bytes(launch: Launch) -> int:
    """Returns the bytes between L2 and the multiprocessors, if L1 keeps all that a block has loaded."""
    loaded = sum(t.block_sectors for _, t in launch.traffic("load"))
    return SECTOR * (loaded + sum(t.sectors for _, t in launch.traffic("uncached", "store", "atomic")))


def read_again(launch: Launch) -> dict[str, int]:
    """Returns the bytes that last blocks to arrive read of what their launch has written, by tensor."""
    if "atomic" not in launch.tensors.get("arrived", {}):
        return {}
    written = {name: by for name, by in launch.tensors.items() if "store" in by and name != "arrived"}
    sectors = {
        name: sum(t.block_sectors if path == "load" else t.sectors for path, t in by.items() if path != "store")
        for name, by in written.items()
    }
    return {name: SECTOR * count for name, count in sectors.items() if count > 0}


def last_block_time(launch: Launch, gpu: Gpu) -> float:
    """Returns how long last blocks work alone, one for each counter, on as many multiprocessors."""
    if not (read := sum(read_again(launch).values())):
        return 0.0
    blocks = launch.tensors["arrived"]["atomic"].unique_bytes / COUNTER
    busiest = read / blocks * math.ceil(blocks / gpu.multiprocessors)
    return LAST_BLOCK_ROUNDS * gpu.l2_latency + max(busiest / gpu.multiprocessor_l2, read / gpu.l2)


def kernel_time(launch: Launch, gpu: Gpu, prefetched: float = 0.0) -> KernelTime:
    """Models a kernel. Raises ValueError where none of its blocks fits on the GPU.

    prefetched: bytes that it reads from DRAM for the next kernel; of a next kernel, negative.
    """
    occupancy = occupancy_of(launch, gpu)
    waves = -(-launch.blocks // (occupancy * gpu.multiprocessors))
    busiest = -(-launch.blocks // gpu.multiprocessors) / launch.blocks  # a multiprocessor's share of the blocks
    again, alone = read_again(launch), last_block_time(launch, gpu)
    from_dram, moved = dram_bytes(launch, gpu) + prefetched, l2_bytes(launch)
    from_l2 = moved - sum(again.values())
    copied = SECTOR * sum(t.sectors for name, t in launch.traffic("uncached") if name not in again)
    under_way = COPY * launch.copies * launch.threads * min(launch.blocks, occupancy * gpu.multiprocessors)
    waited = sum(
        count * (gpu.dram_latency if name in COLD else gpu.l2_latency)
        for name, count in launch.rounds.items()
        if name not in again
    )
    chained = max(0, launch.chain - sum(launch.rounds.values())) * gpu.l2_latency
    terms = {
        "dram": from_dram / gpu.dram,
        "l2": max(from_l2 / gpu.l2, from_l2 * busiest / gpu.multiprocessor_l2),
        "tensor": PRODUCT * launch.products * busiest * gpu.multiprocessors / gpu.products,
        "shared": launch.wavefronts * busiest / gpu.wavefronts,
        "latency": max((waited + chained) * waves, gpu.dram_latency * copied / under_way if under_way else 0.0),
    }
    first = gpu.dram_latency if from_dram else 0.0  # memory idles until the first bytes arrive
    us = gpu.start + first + max(terms.values()) + alone
    return KernelTime(launch.kernel, us, terms, from_dram, moved, occupancy, waves, launch, alone)


def bytes_time(nbytes: float, gpu: Gpu) -> KernelTime:
    """Models a kernel that is not counted by the bytes that it moves between DRAM and the multiprocessors."""
    terms = {"dram": nbytes / gpu.dram, "l2": nbytes / gpu.l2}
    return KernelTime("by bytes", gpu.start + gpu.dram_latency + max(terms.values()), terms, nbytes, nbytes)


def library_time(rows: int, n: int, c: int, gpu: Gpu, prefetched: float = 0.0) -> KernelTime:
    """Models cuBLAS, which the simulator cannot count: bytes and operations follow from the shape.

    prefetched: see kernel_time.
    """
    weight, others = 2 * n * c, (2 * rows * c, 4 * rows * n)
    from_dram = weight + prefetched + sum(nbytes for nbytes in others if nbytes > gpu.l2_bytes)
    from_l2 = weight + sum(others)
    terms = {"dram": from_dram / gpu.library_dram, "tensor": 2 * rows * n * c / gpu.library_products}
    return KernelTime("library", gpu.library_start + max(terms.values()), terms, from_dram, from_l2)
