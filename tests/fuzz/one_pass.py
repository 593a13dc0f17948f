"""Harnesses: the files of drafters that draft all levels in one pass."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import save

from specengine.drafters import load_drafter
from tests.drafters.block_gguf import write_gguf
from tests.drafters.block_heads import DFLASH2, DOMINO, DSPARK, dflash2_state, domino_state, dspark_state
from tests.drafters.p_eagle_files import LAYOUTS
from tests.drafters.pard_files import JSON as PARD_JSON
from tests.drafters.pard_files import PARD2, pard_state, warp_state
from tests.engines import tiny_model
from tests.fuzz import seeds
from tests.fuzz.contract import Harness
from tests.fuzz.mutations import damaged_bytes, damaged_json, damaged_safetensors, damaged_torch_file

JSON = 64  # bytes of Python's objects per byte of text
ROOM = 8 << 20  # bytes; the intact files beside the damaged one take some


@lru_cache
def _pard() -> dict[str, bytes]:
    warp = seeds.written(partial(torch.save, warp_state(tiny_model().config.hidden_size)))
    return {
        "config.json": json.dumps(PARD_JSON | PARD2).encode(),
        "model.safetensors": save(pard_state()),
        "warp_model.bin": warp,
    }


@lru_cache
def _p_eagle() -> dict[str, bytes]:
    config, state = LAYOUTS["vllm"]
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(state)}


@lru_cache
def _block(family: str) -> dict[str, bytes]:
    kinds = {
        "dflash": (DFLASH2, dflash2_state),
        "domino": (DOMINO, domino_state),
        "dspark": (DSPARK | {"markov_head_type": "rnn"}, partial(dspark_state, kind="rnn")),
    }
    config, state = kinds[family]
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(state())}


def _load(path: Path, drafter: str, intact: dict[str, bytes]) -> None:
    """Loads a folder of which one file is damaged."""
    for name in {*intact} - {path.name}:
        (path.parent / name).write_bytes(intact[name])
    load_drafter(f"{drafter}:{path.parent}", tiny_model().target)


def _write_gguf(path: Path) -> None:
    write_gguf(path, dspark_state(), {"has_confidence_head": True})


def _gguf() -> Harness:
    return Harness(
        "dspark gguf",
        lru_cache(maxsize=1)(lambda: [seeds.written(_write_gguf)]),
        lambda path: load_drafter(f"dspark:{path}", tiny_model().target),
        ("drafter.gguf", "drafter:"),
        "drafter.gguf",
        damaged_bytes,
        JSON,
        ROOM,
    )


def _harness(drafter: str, files, name: str, mutation) -> Harness:
    folder = f"{drafter}-{name.partition('.')[0]}"
    return Harness(
        f"{drafter} {name}",
        lambda: [files()[name]],
        lambda path: _load(path, drafter, files()),
        (folder, "drafter:"),
        f"{folder}/{name}",
        mutation,
        JSON,
        ROOM,
    )


HARNESSES = (
    _harness("pard", _pard, "config.json", damaged_json),
    _harness("pard", _pard, "warp_model.bin", damaged_torch_file),
    _harness("p-eagle", _p_eagle, "config.json", damaged_json),
    _harness("p-eagle", _p_eagle, "model.safetensors", damaged_safetensors),
    _harness("dflash", partial(_block, "dflash"), "config.json", damaged_json),
    _harness("dflash", partial(_block, "dflash"), "model.safetensors", damaged_safetensors),
    _gguf(),
    _harness("domino", partial(_block, "domino"), "config.json", damaged_json),
    _harness("dspark", partial(_block, "dspark"), "config.json", damaged_json),
)
