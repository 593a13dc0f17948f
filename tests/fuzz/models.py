"""Harnesses: files of weights and their configurations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save

from specengine.drafters.phrases.file import open_pool, save_pool
from specengine.drafters.suffix.corpus_file import open_corpus, write_corpus
from specengine.models.checkpoint import Checkpoint, expected_tensors, open_checkpoint
from specengine.models.config_gguf import config_from_gguf
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.models.gguf_dialects import normal_metadata
from specengine.models.rope import rope_tables
from specengine.tokenizer import Tokenizer
from specengine.utils.json_file import read_json_object
from tests.fuzz import seeds
from tests.fuzz.contract import Harness
from tests.fuzz.mutations import Mutation, damaged_bytes, damaged_json, damaged_safetensors, damaged_torch_file

_POOL = (2, 3, 50)
_TARGET = SimpleNamespace(final_norm=torch.ones(4), config=SimpleNamespace(vocab_size=20))


def _read(checkpoint: Checkpoint) -> None:
    rope_tables(checkpoint.config, min(16, checkpoint.config.max_position))
    for name, shape in expected_tensors(checkpoint.config).items():
        assert checkpoint.read_rows(name, 0, min(2, shape[0])).shape[1:] == shape[1:]


def _gguf(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    _read(checkpoint)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    tokenizer.decode(tokenizer.encode("tok1 é"))


def _keys() -> list[bytes]:
    """Keys of GGUF files as JSON, with numbers of every layer."""
    found = []
    for arch, changes in (("llama", {}), ("qwen35", {"attention.head_count_kv": [0, 0, 0, 1]})):
        keys = {"block_count": 4, "context_length": 64, "embedding_length": 32, "attention.head_count": [2] * 4}
        keys |= {"feed_forward_length": [32] * 4, "attention.head_count_kv": 1, "rope.freq_base": [1e4] * 4}
        keys |= {"attention.layer_norm_rms_epsilon": 1e-5, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        keys |= {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_attn_factor": 0.5, "expert_used_count": 1}
        keys |= {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 1, "ssm.time_step_rank": 2}
        keys |= {"ssm.inner_size": 16, "ssm.v_head_reordered": True, **changes}
        named = {f"{arch}.{key}": value for key, value in keys.items()}
        ends = {"tokenizer.ggml.bos_token_id": 2**32 - 1, "tokenizer.ggml.eos_token_ids": [2, 50]}
        found.append(json.dumps({"general.architecture": arch, **named, **ends}).encode())
    return found


def _read_keys(path: Path) -> None:
    """Of a file without tensors but the embedding."""
    embedding = SimpleNamespace(shape=(40, 32))
    file = SimpleNamespace(path=path, metadata=read_json_object(path), tensors={"token_embd.weight": embedding})
    config = config_from_gguf(normal_metadata(file), {"token_embd.weight": (40, 32)}, (), str(path))
    if config.rotated <= 64:  # shapes of tensors bound it in a file
        rope_tables(config, min(16, config.max_position))


def _part(path: Path) -> None:
    """Of a damaged second part, and an intact first one."""
    path.with_name("part-00001-of-00002.gguf").write_bytes(seeds.gguf_parts()[0])
    _gguf(path)


def _folder(path: Path) -> None:
    """Of a damaged file and intact ones beside it."""
    intact = {"config.json": seeds.configs()[0], "model.safetensors": seeds.safetensors()[0]}
    for name in {*intact} - {path.name} if path.name != "pytorch_model.bin" else {"config.json"}:
        (path.parent / name).write_bytes(intact[name])
    _read(open_checkpoint(path.parent))


def _index() -> list[bytes]:
    return [json.dumps({"weight_map": dict.fromkeys(seeds.state(), "model.safetensors")}).encode()]


def _drafter_tensors() -> dict[str, torch.Tensor]:
    codes = {"fc.weight": torch.ones(32, 64, dtype=torch.int8), "fc.weight_scale": torch.ones(32, 2).half()}
    return {**codes, "d2t": torch.arange(8), "norm.weight": torch.ones(32)}


def _drafter_seeds() -> list[bytes]:
    return [save(_drafter_tensors())]


def _drafter(path: Path) -> None:
    if path.name == "config.json":
        (path.parent / "model.safetensors").write_bytes(_drafter_seeds()[0])
    drafter = open_draft_checkpoint(path.parent)
    for name, info in drafter.tensors.items():
        if info.shape:
            drafter.read_rows(name, 0, min(2, info.shape[0]))
    drafter.vocabulary(seeds.TINY)
    if path.name == "config.json":
        assert drafter.attention_reach <= drafter.config.max_position
        drafter.hidden_state_layers(seeds.TINY)


def _drafter_configs() -> list[bytes]:
    eagle = {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
        "trained_length": 32,
        "target_hidden_size": 32,
    }
    return [json.dumps({**seeds.CONFIG, **eagle}).encode(), *seeds.configs()]


def _pool_seeds() -> list[bytes]:
    from specengine._C import PhrasePool

    pool = PhrasePool(*_POOL)
    for number in range(30):
        pool.insert(number % 20, [number % 5, number % 7])
    return [seeds.written(lambda path: save_pool(path, pool, _TARGET))]


def _pool(path: Path) -> None:
    pool = open_pool(path, _POOL, _TARGET)
    assert all(0 <= token < 20 for token in pool.tokens())


def _corpus_seeds() -> list[bytes]:
    texts = [[1, 2, 3, 1, 2, 4], [1, 2, 3, 3], [0, 70_000 % 40]]
    return [seeds.written(partial(write_corpus, texts=each)) for each in (texts, [[1, 2, 70_000]])]


def _corpus(path: Path) -> None:
    from specengine._C import CONTINUATION_KINDS

    corpus = open_corpus(path, 80_000)
    tokens, parents, _ = corpus.continuations([9, 1, 2], 16, 8, 4, [0.9] * CONTINUATION_KINDS, 0.0)
    assert all(0 <= token < 80_000 for token in tokens) and all(p < node for node, p in enumerate(parents))


def _harness(
    name: str,
    filename: str,
    of: Callable[[], Sequence[bytes]],
    use: Callable[[Path], None],
    mutation: Mutation = damaged_bytes,
    growth: int = 4,
) -> Harness:
    folder = filename.partition("/")[0]
    return Harness(name, lru_cache(maxsize=1)(of), use, (folder, "tokenizer."), filename, mutation, growth)


JSON = 64  # bytes of Python's objects per byte of text
HARNESSES = (
    _harness("gguf", "model.gguf", seeds.gguf, _gguf, growth=JSON),
    _harness("gguf keys", "keys/keys.json", _keys, _read_keys, damaged_json, JSON),
    _harness("gguf part", "part-00002-of-00002.gguf", lambda: seeds.gguf_parts()[1:], _part, growth=JSON),
    _harness("safetensors", "weights/model.safetensors", seeds.safetensors, _folder, damaged_safetensors, JSON),
    _harness("torch file", "pickled/pytorch_model.bin", seeds.torch_files, _folder, damaged_torch_file, JSON),
    _harness("config.json", "configured/config.json", seeds.configs, _folder, damaged_json, JSON),
    _harness("index.json", "indexed/model.safetensors.index.json", _index, _folder, damaged_json, JSON),
    _harness("drafter", "drafter/model.safetensors", _drafter_seeds, _drafter, damaged_safetensors, JSON),
    _harness("drafter config", "drafter-config/config.json", _drafter_configs, _drafter, damaged_json, JSON),
    _harness("pool", "pool.file", _pool_seeds, _pool, damaged_safetensors, JSON),
    _harness("corpus", "corpus.file", _corpus_seeds, _corpus, damaged_safetensors, JSON),
)
