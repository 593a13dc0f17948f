import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from specengine._C import PhrasePool
from specengine.drafters.phrases import file as phrase_file
from specengine.drafters.phrases.file import open_pool, save_pool
from tests.drafters.function_model import pool_of
from tests.drafters.phrase_pools import SHAPE, TARGET, filled

OTHER = SimpleNamespace(final_norm=torch.zeros(4), config=TARGET.config)


def same(one, other):
    return pool_of(one) == pool_of(other) and one.tokens() == other.tokens()


@pytest.mark.parametrize("count", [0, 1, 40, 500])
def test_a_pool_comes_back_as_it_was(tmp_path, count):
    pool, path = filled(count), tmp_path / "folder" / "pool"
    save_pool(path, pool, TARGET)
    assert same(open_pool(path, SHAPE, TARGET), pool)
    assert [file.name for file in path.parent.iterdir()] == ["pool"]


def test_a_smaller_pool_takes_the_newest(tmp_path):
    pool = PhrasePool(1, 4, 10)
    for token in (1, 2, 3):
        for phrase in (5, 6, 7):
            pool.insert(token, [phrase])
    save_pool(tmp_path / "pool", pool, TARGET)
    assert pool_of(open_pool(tmp_path / "pool", (1, 2, 2), TARGET)) == {2: [(6,), (7,)], 3: [(6,), (7,)]}


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    path = tmp_path / "pool"
    with pytest.raises(FileNotFoundError, match="expected a file of phrases"):
        open_pool(path, SHAPE, TARGET)
    save_pool(path, filled(), TARGET)
    with pytest.raises(ValueError, match="another model's"):
        open_pool(path, SHAPE, OTHER)
    with pytest.raises(ValueError, match="phrases of 2 tokens, expected 3"):
        open_pool(path, (3, 3, 50), TARGET)
    save_file({"x": np.zeros(1)}, path, {})
    with pytest.raises(ValueError, match="no file of phrases"):
        open_pool(path, SHAPE, TARGET)


@pytest.mark.parametrize("token, phrase", [(20, [1, 2]), (1, [2, 20]), (-1, [1, 2]), (1, [-1, 2])])
def test_tokens_that_the_target_does_not_have_are_refused(tmp_path, token, phrase):
    pool = filled()
    save_pool(tmp_path / "pool", pool, TARGET)
    assert same(open_pool(tmp_path / "pool", SHAPE, TARGET), pool)
    pool.insert(token, phrase)
    save_pool(tmp_path / "pool", pool, TARGET)
    with pytest.raises(ValueError, match="another model's"):
        open_pool(tmp_path / "pool", SHAPE, TARGET)


def test_a_type_that_numpy_lacks_is_a_damaged_file(tmp_path):
    parts = {name: torch.zeros(1, dtype=torch.bfloat16) for name in ("tokens", "counts", "phrases")}
    save_torch_file(parts, tmp_path / "pool", {"format": "specengine-phrases-1"})
    with pytest.raises(ValueError, match="cannot be used"):
        open_pool(tmp_path / "pool", SHAPE, TARGET)


def test_a_token_may_lose_its_phrases_while_its_pool_is_saved(tmp_path):
    pool = filled()
    lost = [99, *pool.tokens()]
    in_use = SimpleNamespace(tokens=lambda: lost, newest=pool.newest, width=pool.width, length=pool.length)
    save_pool(tmp_path / "pool", in_use, TARGET)
    assert same(open_pool(tmp_path / "pool", SHAPE, TARGET), pool)


def test_threads_may_save_to_one_file(tmp_path, monkeypatch):
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(phrase_file, "save_file", lambda *arguments: (save_file(*arguments), both.wait()))
    path, pools = tmp_path / "pool", [filled(seed=seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda pool: save_pool(path, pool, TARGET), pools))
    assert any(same(open_pool(path, SHAPE, TARGET), pool) for pool in pools)
    assert [file.name for file in tmp_path.iterdir()] == ["pool"]


def test_a_damaged_file_is_refused(tmp_path):
    path, draw = tmp_path / "pool", random.Random(2)
    save_pool(path, filled(), TARGET)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in (0, 1, 7, 8, 50, len(whole) // 2, len(whole) - 1)] + [whole + b"x"]
    for _ in range(300):
        place = draw.randrange(len(whole))
        damaged.append(whole[:place] + bytes([whole[place] ^ draw.randrange(1, 256)]) + whole[place + 1 :])
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            assert same(open_pool(path, SHAPE, TARGET), filled())  # a byte that says nothing, as white space
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 0.9 * len(damaged)


SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.drafters.phrase_pools import TARGET, filled
from specengine.drafters.phrases.file import save_pool
pools = [filled(seed=seed) for seed in (1, 2)]
save_pool({path!r}, pools[0], TARGET)
print("ready", flush=True)
while True:
    for pool in pools:
        save_pool({path!r}, pool, TARGET)
"""


@pytest.mark.full
def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    path, draw = tmp_path / "pool", random.Random(3)
    pools = [filled(seed=seed) for seed in (1, 2)]
    code = SAVER.format(root=str(__file__).rsplit("/tests/", 1)[0], path=str(path))
    seen = set()
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        process.stdout.readline()
        for _ in range(30):
            time.sleep(draw.random() * 0.003)
            process.send_signal(signal.SIGSTOP)  # what a kill here would leave
            found = open_pool(path, SHAPE, TARGET)
            seen.add([same(found, pool) for pool in pools].index(True))
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        assert any(same(open_pool(path, SHAPE, TARGET), pool) for pool in pools)
    assert seen == {0, 1}
