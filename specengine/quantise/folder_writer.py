"""Writes checkpoint folders of int4-g128 and fp8-block: config.json, weights in safetensors, tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specengine.models.experts.tensors import published_name
from specengine.models.gated_delta.hf_config import text_config
from specengine.models.gated_delta.tensors import DRAFTER
from specengine.quantise import fp8_blocks, int4_groups
from specengine.quantise.folder_tokenizer import write_tokenizer
from specengine.quantise.hf_config import config_json
from specengine.quantise.sharded_file import SHARD_BYTES, Entry, write_shards
from specengine.quantise.source import Source, is_gate, is_linear
from specengine.tokenizer.folder_vocab import model_name
from specengine.tokenizer.gguf_vocab import NAME_KEYS
from specengine.utils.atomic_file import atomic_folder
from specengine.utils.json_file import read_json_object

# what a folder holds beside weights and config.json
_COMPANIONS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_ENDS = ("lm_head", "model.embed_tokens")  # they keep 16 bits: their errors reach every token


def write_folder(source: Source, to: str, out: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a source to folder `out` as `to`, int4-g128 or fp8-block.

    Raises ValueError for a matrix whose columns have no groups, and for what a folder cannot say.
    """
    entries = [entry for name in source.shapes for entry in _entries(source, name, to)]
    config = _config(source)
    for name in ("quantization_config", "compression_config", "dtype"):
        config.pop(name, None)
    if not source.checkpoint.config.tie_embeddings:  # quantised folders may say that they are tied, and have a head
        config["tie_word_embeddings"] = False
    config["torch_dtype"] = "bfloat16"
    config["quantization_config"] = _int4_config(source) if to == "int4-g128" else _fp8_config(source)
    with atomic_folder(out) as folder:
        write_shards(folder, entries, _tensors(source, to), shard_bytes)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if source.folder is None:
            write_tokenizer(source.checkpoint, folder)
        else:
            for name in _COMPANIONS:
                if (source.folder / name).is_file():
                    shutil.copyfile(source.folder / name, folder / name)


def _entries(source: Source, name: str, to: str) -> list[Entry]:
    shape, stored = source.shapes[name], _stored_name(source, name)
    if not is_linear(name):
        return [Entry(stored, _float_dtype(source, name), shape)]
    rows, columns = shape
    stem = stored.removesuffix(".weight")
    if to == "fp8-block":
        blocks = (-(-rows // fp8_blocks.BLOCK), -(-columns // fp8_blocks.BLOCK))
        weight = Entry(stored, torch.float8_e4m3fn, shape)
        return [weight, Entry(f"{stem}.weight_scale_inv", torch.bfloat16, blocks)]
    return [
        Entry(f"{stem}.weight_packed", torch.int32, (rows, columns // 8)),
        Entry(f"{stem}.weight_scale", torch.bfloat16, (rows, columns // _group(source, name))),
        Entry(f"{stem}.weight_shape", torch.int64, (2,)),
    ]


def _stored_name(source: Source, name: str) -> str:
    return published_name(name, source.checkpoint.config.architecture)


def _float_dtype(source: Source, name: str) -> torch.dtype:
    """Types of 16 bits stay, as do vectors, convolutions and gates; other matrices become bfloat16."""
    stored = getattr(torch, source.checkpoint.tensors[name].dtype, torch.float32)
    keeps = len(source.shapes[name]) != 2 or is_gate(name)
    return torch.bfloat16 if stored == torch.float32 and not keeps else stored


def _group(source: Source, name: str) -> int:
    """Returns the group size of a matrix; all experts have one, as transformers and vLLM ask.

    Raises ValueError for columns that no group divides.
    """
    columns, config = source.shapes[name][1], source.checkpoint.config
    group = int4_groups.group_of(columns)
    if group is None:
        raise ValueError(
            f"{source.checkpoint.source}: tensor '{name}' has {columns} columns; int4-g128 needs a multiple of 32"
        )
    if config.moe is None or ".experts." not in name:
        return group
    # a side without groups is refused at its own tensor
    sides = (int4_groups.group_of(side) for side in (config.hidden_size, config.moe.intermediate_size))
    return min(filter(None, sides))


def _tensors(source: Source, to: str) -> Iterator[Iterable[torch.Tensor]]:
    """Yields the values of all entries in their order, each as parts."""
    for name in source.progressing(source.shapes):
        steps = (rows for _, rows in source.steps(name))
        if not is_linear(name):
            yield map(partial(torch.Tensor.to, dtype=_float_dtype(source, name)), steps)
        elif to == "fp8-block":
            yield from zip(*map(fp8_blocks.quantise_rows, steps), strict=True)
        else:
            yield from zip(*map(partial(int4_groups.quantise_rows, group=_group(source, name)), steps), strict=True)
            yield [torch.tensor(source.shapes[name])]


def _config(source: Source) -> dict[str, Any]:
    """Returns config.json with the model's name, which selects a chat format where there is no template."""
    if source.folder is not None:
        config = dict(read_json_object(source.folder / "config.json"))
        if source.published:
            config = text_config(config, source.checkpoint.config.architecture)
        name = model_name(source.folder)
    else:
        config = config_json(source.checkpoint.config, source.checkpoint.source)
        name = " ".join(str((source.checkpoint.metadata or {}).get(key, "")) for key in NAME_KEYS)
    if name.strip() and not config.get("_name_or_path"):
        config["_name_or_path"] = name.strip()
    return config


def _left_out(source: Source) -> list[str]:
    """Lists the modules that stay floats."""
    gates = [_stored_name(source, name).removesuffix(".weight") for name in source.shapes if is_gate(name)]
    drafter = [f"re:^{re.escape(DRAFTER)}.*"] if any(name.startswith(DRAFTER) for name in source.shapes) else []
    return [*_ENDS, *gates, *drafter]


def _fp8_config(source: Source) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8_blocks.BLOCK, fp8_blocks.BLOCK],
        "modules_to_not_convert": _left_out(source),
    }


def _int4_config(source: Source) -> dict[str, Any]:
    """Lists the matrices of each group size by their places in a layer; one size needs no list."""
    members: dict[int, set[str]] = {}
    for name in filter(is_linear, source.shapes):
        members.setdefault(_group(source, name), set()).add(_pattern(_stored_name(source, name)))
    groups = {}
    for number, (group, patterns) in enumerate(sorted(members.items(), reverse=True)):
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": group,
            "dynamic": False,
        }
        targets = ["Linear"] if len(members) == 1 else sorted(patterns)
        activations = {"input_activations": None, "output_activations": None}
        groups[f"group_{number}"] = {"targets": targets, "weights": weights, **activations, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _left_out(source),
        "kv_cache_scheme": None,
    }


def _pattern(name: str) -> str:
    r"""Returns the pattern of a matrix in all layers and experts, such as `re:.*\.mlp\.experts\.\d+\.up_proj$`."""
    parts = name.split(".")[3:-1]  # less model.layers.N and weight
    return r"re:.*\." + r"\.".join(r"\d+" if part.isdigit() else part for part in parts) + "$"
