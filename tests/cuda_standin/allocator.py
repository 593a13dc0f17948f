"""Torch's caching allocator: private pools with use counts, live blocks, and reuse of memory by stream."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field

import torch

from tests.cuda_standin.refusals import Refusals
from tests.cuda_standin.streams import Accesses, Known, Stream

GRANULE = 512  # torch rounds every block up to it
DEFAULT_POOL = (0, 0)


@dataclass(eq=False)
class Piece:
    """A part of a segment."""

    segment: torch.Tensor
    start: int
    size: int
    free: bool = False

    def memory(self, size: int) -> torch.Tensor:
        """Its first bytes."""
        return self.segment[self.start : self.start + size]


class Block:
    """Memory that tensors hold. It returns to its pool, for its stream, with the last of them."""

    def __init__(self, pool: Pool, stream: Stream, piece: Piece, refusals: Refusals, host: Known) -> None:
        self.pool, self.stream, self.piece = pool, stream, piece
        self.accesses = Accesses()
        self.recorded = False  # record_stream() was called: torch waits for the other streams
        self._refusals, self._host = refusals, host

    @property
    def size(self) -> int:
        return self.piece.size

    def __del__(self) -> None:
        for stream, work in self.accesses.places(with_reads=True):
            known = max(self.stream.known.get(stream, 0), self._host.get(stream, 0))
            if known < work and not self.recorded:
                self._refusals.refuse("memory is freed for its own stream while another stream may still use it")
        self.pool.returned.append((self.stream.id, self.piece))


@dataclass(eq=False)
class Pool:
    """Segments by stream.  use_count: graphs that hold it.  returned: pieces of dead blocks."""

    use_count: int = 0
    pieces: dict[int, list[Piece]] = field(default_factory=dict)
    returned: deque[tuple[int, Piece]] = field(default_factory=deque)
    most: int = 0

    def take_back(self) -> None:
        """Frees the pieces of dead blocks, and joins free neighbours."""
        while self.returned:
            stream, piece = self.returned.popleft()
            piece.free = True
            joined: list[Piece] = []
            for each in self.pieces[stream]:
                last = joined[-1] if joined else None
                if last and last.free and each.free and last.segment is each.segment:
                    last.size += each.size
                else:
                    joined.append(each)
            self.pieces[stream] = joined

    def take(self, size: int, stream: int) -> Piece:
        """Returns the smallest free piece that is large enough, cut to size, or a new segment."""
        self.take_back()
        size = max(GRANULE, -(-size // GRANULE) * GRANULE)
        pieces = self.pieces.setdefault(stream, [])
        fitting = [piece for piece in pieces if piece.free and piece.size >= size]
        if fitting:
            piece = min(fitting, key=lambda each: each.size)
            if piece.size > size:
                rest = Piece(piece.segment, piece.start + size, piece.size - size, free=True)
                pieces.insert(pieces.index(piece) + 1, rest)
                piece.size = size
            piece.free = False
        else:
            piece = Piece(torch.zeros(size, dtype=torch.uint8), 0, size)
            pieces.append(piece)
        self.most = max(self.most, self.live)
        return piece

    def drop_unused(self) -> None:
        """Gives whole free segments back."""
        self.take_back()
        for stream, pieces in self.pieces.items():
            self.pieces[stream] = [p for p in pieces if not p.free or p.size < len(p.segment)]

    @property
    def live(self) -> int:
        """Bytes of live blocks."""
        self.take_back()
        return sum(piece.size for pieces in self.pieces.values() for piece in pieces if not piece.free)

    @property
    def reserved(self) -> int:
        """Bytes of segments."""
        return sum(piece.size for pieces in self.pieces.values() for piece in pieces)


class Allocator:
    """Gives memory of the current stream's pool: a graph's private one while the stream is captured."""

    def __init__(self, refusals: Refusals, host: Known) -> None:
        self._refusals, self._host = refusals, host
        self.pools: dict[tuple[int, int], Pool] = {DEFAULT_POOL: Pool(use_count=1)}
        self.blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    def allocate(self, size: int, stream: Stream, pool: tuple[int, int]) -> Block:
        """Returns a new block."""
        of = self.pools[pool]
        block = Block(of, stream, of.take(size, stream.id), self._refusals, self._host)
        self.blocks.add(block)
        return block

    def hold(self, pool: tuple[int, int]) -> None:
        """A graph begins to use a private pool. Refuses a pool whose graphs have gone while blocks of it live on."""
        known = self.pools.get(pool)
        if known is None:
            self.pools[pool] = Pool(use_count=1)
        elif known.use_count == 0:
            raise self._refusals.refuse(
                "use_count > 0: every graph of this memory pool was dropped, its blocks live on"
            )
        else:
            known.use_count += 1

    def release(self, pool: tuple[int, int]) -> None:
        """A graph that used a private pool is dropped."""
        self.pools[pool].use_count -= 1

    def empty_cache(self) -> None:
        """Gives unused segments back: of the default pool, and of private ones that no graph holds."""
        for handle, pool in list(self.pools.items()):
            if handle == DEFAULT_POOL or pool.use_count == 0:
                pool.drop_unused()
                if handle != DEFAULT_POOL and not pool.reserved:
                    del self.pools[handle]

    @property
    def live(self) -> int:
        """Bytes of all live blocks."""
        return sum(pool.live for pool in self.pools.values())

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(pool.reserved for pool in self.pools.values())
