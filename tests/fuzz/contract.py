"""What holds for every untrusted input, whatever its bytes, and what a harness is."""

from __future__ import annotations

import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutations import Mutation, damaged_bytes

SECONDS = 1.0  # of processor time, for files of the size that is tried here
BASE_BYTES = 2 << 20  # what reading anything takes: buffers, compiled templates, caches of the libraries


@dataclass(frozen=True)
class Harness:
    """seeds: intact files, at least one.  use: reads a file and uses what came of it; it may raise ValueError and
    FileNotFoundError.  named: one of these texts is in every error.  growth: bytes of memory per byte of file,
    beside `base`.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    use: Callable[[Path], None]
    named: tuple[str, ...]
    filename: str
    mutation: Mutation = damaged_bytes
    growth: int = 4
    base: int = BASE_BYTES


def violation(harness: Harness, data: bytes, folder: Path, weighed: bool = True) -> str | None:
    """How an input breaks the contract; None: it does not.  weighed: its memory is counted, which takes as long again.

    Either it loads and can be used, or a ValueError or FileNotFoundError names the file or argument; within a second
    and in memory that follows from the file's size. An input that takes too much must do so twice: every few thousand
    inputs the interpreter rebuilds its table of interned strings (7.7 MB) within a try.
    """
    problem = _violation(harness, data, folder, weighed)
    if problem is not None and problem.startswith("took"):
        problem = _violation(harness, data, folder, weighed)
    return problem


def _violation(harness: Harness, data: bytes, folder: Path, weighed: bool) -> str | None:
    path = folder / harness.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if weighed:
        tracemalloc.start()
    began, problem = time.process_time(), None
    try:
        harness.use(path)
    except (ValueError, FileNotFoundError) as error:
        if not any(name in str(error) for name in harness.named):
            problem = f"{type(error).__name__} names none of {harness.named}: {str(error)[:200]!r} {_place(error)}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a library is no Exception
        problem = f"{type(error).__name__}: {str(error)[:200]!r} {_place(error)}"
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if problem is None and seconds > SECONDS:
        problem = f"took {seconds:.1f} s"
    if problem is None and peak > harness.base + harness.growth * len(data):
        problem = f"took {peak} bytes of memory for a file of {len(data)}"
    return problem


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/specengine/" in frame.filename]
    return f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
