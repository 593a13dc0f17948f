"""Packed weights in the cache folder: the same bits as packed anew, and no fault of the folder reaches a user."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from specengine import _C, Engine, SamplingParams
from specengine.models.checkpoint import open_checkpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.models.weights import WeightLoader
from specengine.utils import kept_weights
from specengine.utils.cache_dir import cache_dir
from specengine.utils.kept_weights import KeptWeights
from tests.models.files import random_state
from tests.models.gguf_files import Type, write_gguf

CPU = torch.device("cpu")
CONFIG = replace(PRESETS["tiny-llama"], hidden_size=256, intermediate_size=512, num_layers=2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of packed weights, which keeps those of small models too."""
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 1)
    return tmp_path / "cache" / "weights"


def model_file(path: Path, seed: int = 0) -> Path:
    """A file with matrices that are requantised (Q5_0) and some that are stored as the kernels read them (Q8_0)."""
    state = {name: tensor + seed / 100 for name, tensor in random_state(CONFIG).items()}
    for name in [name for name in state if name.endswith("_proj.weight") or "embed" in name]:
        kind = "Q8_0" if "down" in name else "Q5_0"
        state[name] = (gguf.quants.quantize(state[name].numpy(), Type[kind]), Type[kind])
    return write_gguf(path, CONFIG, state)


@pytest.fixture
def model(tmp_path):
    return model_file(tmp_path / "m.gguf")


def wait_for_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "specengine-kept-weights":
            thread.join()


def packed_bytes(model: Path, dtype: str = "auto") -> list[torch.Tensor]:
    """Loads a model, waits for its weights to be written, and returns all packed weights."""
    target = load_transformer(open_checkpoint(model), dtype, CPU)
    wait_for_writers()
    products = [target.weights.embedding, target.weights.head]
    for layer in target.weights.layers:
        products += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
    return [weight.data for product in products for weight in product.weights]


@pytest.fixture
def packings(monkeypatch):
    """The names of the tensors that are packed."""
    names, pack = [], WeightLoader._pack

    def noted(self, name, *arguments):
        names.append(name)
        pack(self, name, *arguments)

    monkeypatch.setattr(WeightLoader, "_pack", noted)
    return names


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("dtype, stored", [("auto", ("down", "lm_head")), ("int8", ("down",)), ("int4", ())])
def test_a_second_start_reads_the_bits_of_the_first_and_packs_only_what_is_stored_so(
    model, cache, packings, dtype, stored
):
    first = packed_bytes(model, dtype)
    (file,) = cache.iterdir()
    packed = {*packings}
    packings.clear()
    assert same(packed_bytes(model, dtype), first)
    assert {*packings} == {name for name in packed if any(part in name for part in stored)}
    assert [*cache.iterdir()] == [file]
    file.unlink()
    assert same(packed_bytes(model, dtype), first)


def test_texts_are_those_of_an_uncached_start(model, cache):
    prompts, params = [[1, 2, 3], [7] * 9], SamplingParams(max_new_tokens=12, temperature=0)

    def tokens():
        return [output.token_ids for output in Engine(model, drafter="prompt_lookup").generate(prompts, params)]

    plain = tokens()
    wait_for_writers()
    assert [*cache.iterdir()]
    assert tokens() == plain


def test_floats_and_random_models_are_not_kept(model, cache):
    packed_bytes(model, "float32")
    load_transformer(open_checkpoint("random:tiny-llama"), "int8", CPU)
    assert not cache.exists()


def test_few_bytes_are_not_kept(model, cache, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: cache.parent)
    packed_bytes(model)
    assert not cache.exists()


def test_another_file_version_or_dtype_is_another_key(model, cache, monkeypatch, packings):
    packed_bytes(model)
    assert len([*cache.iterdir()]) == 1
    packed_bytes(model, "int8")
    assert len([*cache.iterdir()]) == 2
    stat = model.stat()
    model_file(model, seed=1)
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same name, size and time: the ends differ
    assert model.stat().st_size == stat.st_size
    packings.clear()
    packed_bytes(model)
    assert len(packings) > 10 and len([*cache.iterdir()]) == 3
    code = [*kept_weights.code_that_packs()]
    monkeypatch.setattr(kept_weights, "code_that_packs", lambda: ["another version", *code[1:]])
    packings.clear()
    packed_bytes(model)
    assert len(packings) > 10 and len([*cache.iterdir()]) == 4


def damages(data: bytes):
    yield "empty", b""
    yield "only the magic", data[:28]
    yield "half of the head", data[:50]
    yield "another format", data.replace(b"weights 2\n", b"weights 1\n", 1)
    yield "an endless header", data[:28] + b"\xff" * 8 + data[36:]
    for at in (30, 40, 70, 200, len(data) // 2, len(data) - 2000):
        yield f"a flipped bit at {at}", data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    for size in (100, 5000, len(data) // 2, len(data) - 1):
        yield f"{size} bytes", data[:size]
    yield "longer", data + b"\0"
    half = len(data) // 2 // 4096 * 4096
    yield "zeros", data[:half] + bytes(4096) + data[half + 4096 :]
    yield "swapped parts", data[:half] + data[half + 512 : half + 1024] + data[half : half + 512] + data[half + 1024 :]


def test_a_damaged_file_is_packed_anew_and_replaced(model, cache):
    first = packed_bytes(model)
    (file,) = cache.iterdir()
    data = file.read_bytes()
    for what, damaged in damages(data):
        assert damaged != data
        file.write_bytes(damaged)
        assert same(packed_bytes(model), first), what
        assert file.read_bytes() == data, what


def test_a_flipped_bit_anywhere_changes_the_checksum():
    data = torch.arange(3 << 20).mul(2654435761).to(torch.uint8)
    expected = _C.checksum(data)
    for at in (0, 1, 31, 32, 4095, (1 << 20) - 1, 1 << 20, len(data) - 1):
        for bit in (1, 128):
            data[at] ^= bit
            assert _C.checksum(data) != expected
            data[at] ^= bit
    assert _C.checksum(data) == expected
    sizes = [_C.checksum(torch.zeros(size, dtype=torch.uint8)) for size in (0, 1, 31, 32, 33, 1 << 20, (1 << 20) + 1)]
    assert len({*sizes}) == len(sizes)
    with pytest.raises(ValueError, match="data: expected dtype"):
        _C.checksum(torch.zeros(3))


def test_a_mapped_file_keeps_its_bytes_in_large_pages_while_others_read(tmp_path):
    path = tmp_path / "mapped"
    data = torch.arange(70 << 20).mul(2654435761).to(torch.uint8)[: (70 << 20) - 12345]
    path.write_bytes(data.numpy().data)
    with path.open("rb") as file:
        mapped = _C.MappedFile(file.fileno(), len(data))
    memory, expected = torch.frombuffer(mapped, dtype=torch.uint8), _C.checksum(data)
    mover = threading.Thread(target=kept_weights._use_large_pages, args=(mapped,))
    mover.start()
    sums = [_C.checksum(memory)]
    while mover.is_alive():
        sums.append(_C.checksum(memory))
    path.write_bytes(b"")  # the moved bytes are the file's no more
    assert {*sums, _C.checksum(memory)} == {expected}
    assert torch.equal(memory, data)
    assert mapped.use_large_pages(0) == 32 << 20 and mapped.use_large_pages(64 << 20) == len(data)
    for begin in (-1, 1, len(data), 96 << 20):
        with pytest.raises(ValueError, match="begin: "):
            mapped.use_large_pages(begin)
    del mapped
    assert torch.equal(memory, data)
    with path.open("rb") as file, pytest.raises(MemoryError):
        _C.MappedFile(file.fileno(), 1 << 62)


def test_the_folder_is_bounded_and_the_least_recently_used_go(model, cache, monkeypatch):
    packed_bytes(model)
    (first,) = cache.iterdir()
    monkeypatch.setattr(kept_weights, "MOST_BYTES", 5 * first.stat().st_size // 2)  # two of these
    packed_bytes(model, "int8")
    (second,) = {*cache.iterdir()} - {first}
    for path, seconds in ((first, 100), (second, 200)):
        os.utime(path, (seconds, seconds))
    packed_bytes(model)  # a use
    third = model_file(model.with_name("other.gguf"), seed=2)
    packed_bytes(third)
    left = {*cache.iterdir()}
    assert first in left and second not in left and len(left) == 2


def test_parts_of_killed_processes_go(model, cache):
    cache.mkdir(parents=True)
    old, new = cache / ".old.1.2", cache / ".new.1.2"
    for path in (old, new):
        path.write_bytes(b"part")
    os.utime(old, (0, 0))
    packed_bytes(model)
    assert not old.exists() and new.exists()


def test_two_writers_at_once_leave_a_whole_file(model, cache):
    path = cache / "both"
    weights = {"a": torch.arange(1 << 20).to(torch.uint8).view(1 << 10, -1), "b": torch.ones(1000, dtype=torch.uint8)}
    writers = [threading.Thread(target=kept_weights.write_file, args=(path, ["key"], weights)) for _ in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [*cache.iterdir()] == [path]
    kept = kept_weights.KeptWeights(path, ["key"])
    assert all(torch.equal(kept.get(name, each), each) for name, each in weights.items())
    assert kept.get("a", weights["b"]) is None
    assert kept_weights.KeptWeights(path, ["another"]).get("a", weights["a"]) is None


EARLY_END = """
import threading, time
from specengine.utils.kept_weights import _use_large_pages

class Endless:
    size = 1
    def use_large_pages(self, begin):
        time.sleep(0.01)
        return 0

threading.Thread(target=_use_large_pages, args=(Endless(),)).start()
"""


def test_a_process_ends_while_weights_move():
    subprocess.run([sys.executable, "-c", EARLY_END], check=True, timeout=100)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_and_a_folder_that_cannot_be_used_cost_only_the_cache(model, cache, monkeypatch):
    expected = packed_bytes(model)
    shutil.rmtree(cache)
    cache.write_text("a file in the place of the folder")
    assert same(packed_bytes(model), expected)
    cache.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("specengine.utils.atomic_file.os.fsync", full)
        assert same(packed_bytes(model), expected)
        assert not [*cache.iterdir()]  # nor a part of a file
    with monkeypatch.context() as patch:
        patch.setattr(kept_weights.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
        assert same(packed_bytes(model), expected)
        assert not [*cache.iterdir()]
    assert same(packed_bytes(model), expected) and [*cache.iterdir()]


def test_off_turns_the_cache_off(model, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(kept_weights, "cache_dir", cache_dir)
    monkeypatch.setenv("SPECENGINE_CACHE", "off")
    kept = kept_weights.KeptWeights.of_model(str(model), "auto", False)
    kept.put("a", torch.zeros(64 << 20, dtype=torch.uint8))
    assert kept.finish() is None
    monkeypatch.setenv("SPECENGINE_CACHE", str(model.parent / "on"))
    kept = kept_weights.KeptWeights.of_model(str(model), "auto", False)
    kept.put("a", torch.zeros(64 << 20, dtype=torch.uint8))
    kept.finish().join()
    assert [*(model.parent / "on" / "weights").iterdir()]


def test_every_module_that_packs_and_the_core_name_the_code(tmp_path):
    code_of = kept_weights.code_that_packs.__wrapped__
    files = [tmp_path / name for name in ("core.so", "models/a/b.py", "ops/c.py", "drafters/suffix/d.py")]
    other = tmp_path / "engine/e.py"
    for file in (*files, other):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    seen = [code_of(tmp_path, files[0])]
    for file in files:
        file.write_text("2" if file.suffix == ".so" else "12")
        now = code_of(tmp_path, files[0])
        assert now not in seen, file
        seen.append(now)
    other.write_text("12")
    assert code_of(tmp_path, files[0]) == seen[-1]


@pytest.mark.parametrize("at", [0, -1])
def test_both_ends_of_a_models_files_name_them(tmp_path, monkeypatch, at):
    monkeypatch.setattr(kept_weights, "cache_dir", lambda: tmp_path / "cache")
    file, content = tmp_path / "model.gguf", bytearray(1 << 18)
    paths = set()
    for drafts in (False, True):
        for content[at] in (0, 1):
            file.write_bytes(content)
            os.utime(file, ns=(1, 1))
            paths.add(KeptWeights.of_model(str(file), "auto", drafts)._path)
    assert len(paths) == 4


def test_a_file_that_lacks_a_weight_is_written_anew_with_those_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 0)
    weights = {name: torch.full((512,), number, dtype=torch.uint8) for number, name in enumerate("abc")}
    kept = KeptWeights(tmp_path / "file", "key")
    for name in "ab":
        kept.put(name, weights[name])
    kept.finish().join()
    kept = KeptWeights(tmp_path / "file", "key")
    assert torch.equal(kept.get("a", weights["a"]), weights["a"]) and kept.get("c", weights["c"]) is None
    kept.put("c", weights["c"])
    kept.finish().join()
    found, _ = kept_weights.read_file(tmp_path / "file", "key")
    assert found.keys() == {"a", "c"} and all(torch.equal(found[name], weights[name]) for name in found)
