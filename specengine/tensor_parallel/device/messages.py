"""The messages between ranks whose shards are on devices. They have shapes alone: numbers go from device to device."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from specengine.ops.prefill.chains import Chain


@dataclass(frozen=True)
class Connect:
    """All ranks connect their devices.  path: of a file by which they find each other."""

    path: str


@dataclass(frozen=True)
class DeviceForward:
    """All ranks run a pass of the layers; then its packed rows follow on the devices (see packed_rows).

    rows: M.  requests: B.  pages: of a row of the block table.  words: of ancestor bits per row, 0 for chains.
    chains: of the rows, where the host knows them.  positions: the length that the rotary tables must have.
    """

    cache: int
    rows: int
    requests: int
    pages: int
    words: int
    chains: tuple[Chain, ...] | None
    positions: int


@dataclass(frozen=True)
class DeviceCompact:
    """All ranks compact accepted paths of the cache's last pass; then paths [B, nodes] and their lengths follow."""

    cache: int
    requests: int
    nodes: int


@dataclass(frozen=True)
class BeginCapture:
    """All ranks capture what the next messages ask for as a graph with this number, until EndCapture.

    pool: stands for a memory pool of graphs that never run at the same time; None: the graph has its own.
    """

    graph: int
    pool: Hashable


@dataclass(frozen=True)
class EndCapture:
    """The captured graph is complete."""


@dataclass(frozen=True)
class Replay:
    """All ranks replay a graph."""

    graph: int


@dataclass(frozen=True)
class DropGraphs:
    """All ranks free these graphs."""

    graphs: tuple[int, ...]


@dataclass(frozen=True)
class OverlapLaunches:
    """All ranks choose whether kernels start before their predecessors end."""

    enabled: bool
