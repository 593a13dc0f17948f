"""The messages between the ranks of a tensor-parallel model, and their bytes."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass

import numpy as np
import torch

HEADER = struct.Struct("<QQ")  # bytes that follow, and their kind
MESSAGE, ROWS = 0, 1


@dataclass(frozen=True)
class Start:
    """The first message to a rank: its number and the model to read.

    path: of the checkpoint.  device: of the rank's shard, as torch names it.  strict: see ops.Ops.
    """

    rank: int
    size: int
    path: str
    dtype: str
    instruction_set: str
    device: str
    strict: bool


@dataclass(frozen=True)
class Ready:
    """A rank has read its weights."""


@dataclass(frozen=True)
class Failed:
    """A rank failed and ends. reason: type and text of its exception."""

    reason: str


@dataclass(frozen=True)
class PassStates:
    """The recurrent states of a pass.  slots: int32 [B].  final: see ops.gated_delta."""

    slots: np.ndarray
    final: bool


@dataclass(frozen=True)
class Forward:
    """All ranks run a pass of the layers over the M rows of a TreeBatch.

    inputs: float32 [M, hidden], the embedded tokens.  ancestors: None for chains.  positions: the length that the
    rotary tables must have.  states: of a hybrid.
    """

    cache: int
    inputs: np.ndarray
    depths: np.ndarray
    row_start: np.ndarray
    ancestors: np.ndarray | None
    block_table: np.ndarray
    lengths: np.ndarray
    positions: int
    states: PassStates | None = None


@dataclass(frozen=True)
class Compact:
    """All ranks compact the accepted paths of a batch in their part of a cache."""

    cache: int
    block_table: np.ndarray
    lengths: np.ndarray
    path: np.ndarray
    path_length: np.ndarray


RELEASED = -1


@dataclass(frozen=True)
class MoveStates:
    """All ranks write some recurrent states, in this order.

    moves: pairs of a slot and the slot that is copied to it.  None: it becomes the state of the empty text.
      RELEASED: its memory goes back to the system.
    """

    cache: int
    moves: tuple[tuple[int, int | None], ...]


@dataclass(frozen=True)
class CompactStates:
    """All ranks write the recurrent states behind the accepted paths of the cache's last pass."""

    cache: int
    row_start: np.ndarray
    path: np.ndarray
    path_length: np.ndarray


@dataclass(frozen=True)
class OpenCache:
    """All ranks make their part of a cache.  slots: of recurrent states, 0 where the model has none."""

    cache: int
    pages: int
    slots: int
    dtype: str


@dataclass(frozen=True)
class ReleasePages:
    """All ranks give the memory of these pages back to the system.  pages: in order."""

    cache: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class DropCaches:
    """All ranks free their part of these caches."""

    caches: tuple[int, ...]


def encode_message(message: object) -> bytes:
    """Encodes a message with its header."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data), MESSAGE) + data


def encode_rows(x: torch.Tensor) -> bytes:
    """Encodes float32 [rows, columns] with its header."""
    return HEADER.pack(x.nbytes, ROWS) + x.numpy().tobytes()
