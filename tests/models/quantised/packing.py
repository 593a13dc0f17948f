"""Packs weights as the published code of AutoAWQ and GPTQModel lays them out, and writes folders of tiny models."""

import json
from dataclasses import replace

import torch
from safetensors.torch import save_file

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import open_checkpoint
from specengine.models.presets import PRESETS
from specengine.tensor_parallel.loading import load_model
from tests.models.files import random_state

TINY = replace(
    PRESETS["tiny-llama"],
    hidden_size=128,
    intermediate_size=192,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position=256,
)
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output column of each nibble of a word


def linears(state):
    return [name.removesuffix(".weight") for name in state if name.removesuffix(".weight").endswith(NAMES)]


def words(fields, bits):
    """Packs unsigned fields [R, C] into int32 [R, C * bits / 32], a little-endian stream of bits a row."""
    every = (fields.long()[..., None] >> torch.arange(bits)) & 1
    rows = every.reshape(len(fields), -1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 32)).view(len(fields), -1, 32)
    return (rows << torch.arange(32)).sum(2).to(torch.int32)


def grouped(weight, bits, group, symmetric=False):
    """Quantises rows [N, K] by groups. Returns codes [N, K], zeros and float16 scales [N, G], and the values."""
    rows, columns = weight.shape
    parts = weight.view(rows, -1, group)
    most = 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(2) / (most // 2)).half()
        zeros = torch.full(scales.shape, (most + 1) // 2)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(1, most).long()
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most).long()
    values = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.view(rows, columns), zeros, scales, values.view(rows, columns)


def awq(weight, group=64):
    """Returns the tensors of an AWQ module (gemm), and the values they stand for."""
    codes, zeros, scales, values = grouped(weight, 4, group)

    def packed(fields):  # [R, outputs]
        shuffled = fields.view(len(fields), -1, 8)[..., AWQ_ORDER]
        return words(shuffled.reshape(len(fields), -1), 4)

    tensors = {"qweight": packed(codes.T.contiguous()), "qzeros": packed(zeros.T.contiguous())}
    return {**tensors, "scales": scales.T.contiguous()}, values


def gptq(weight, bits=4, group=64, version=1, order=None, symmetric=False):
    """Returns the tensors of a GPTQ module, and its values. order: columns in the order of quantisation."""
    columns = weight.shape[1]
    order = torch.arange(columns) if order is None else order
    codes, zeros, scales, values = grouped(weight[:, order], bits, group, symmetric)
    back = order.argsort()
    qzeros = words(zeros.T.contiguous() - (2 - version), bits)
    tensors = {
        "qweight": words(codes[:, back], bits).T.contiguous(),
        "qzeros": qzeros,
        "scales": scales.T.contiguous(),
        "g_idx": (back // group).to(torch.int32),
    }
    return tensors, values[:, back]


def config_json(config, quantization=None, **fields):
    found = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": 2,
    }
    return {**found, **({"quantization_config": quantization} if quantization else {}), **fields}


def write(folder, config, state, quantization=None, **fields):
    """Writes a folder of safetensors, with a quantization_config where one is given."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config, quantization, **fields)))
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def packed_state(config, pack, chosen=lambda module: True):
    """Packs the linear layers of a random model. Returns the stored tensors, and those of the same model in float32.

    pack: of a weight, returns tensors by the end of their names, and values.  chosen: whether to pack a module.
    """
    plain = random_state(config)
    stored = dict(plain)
    for module in linears(plain):
        if not chosen(module):
            continue
        tensors, values = pack(stored.pop(f"{module}.weight"))
        stored |= {f"{module}.{end}": tensor for end, tensor in tensors.items()}
        plain[f"{module}.weight"] = values
    return stored, plain


def assert_reads_as(checkpoint, plain):
    """Asserts that every tensor reads as the same model's in float32, whole, by rows, and as codes."""
    assert set(checkpoint.tensors) == set(plain)
    for name, tensor in plain.items():
        rows = checkpoint.read(name)
        assert torch.equal(rows, tensor), name
        part = slice(len(tensor) // 3 + 1, len(tensor) - 3)
        assert torch.equal(checkpoint.read_rows(name, part.start, part.stop), tensor[part])
        if checkpoint.tensors[name].coding is None:
            assert checkpoint.column_order(name) is None
            continue
        order = checkpoint.column_order(name)
        expected = tensor[part] if order is None else tensor[part][:, order]
        assert torch.equal(checkpoint.read_coded(name, part.start, part.stop).values(), expected), name


def logits(folder, ids):
    """Runs a prompt through a model loaded as float32."""
    loaded = load_model(folder, device="cpu", dtype="float32")
    cache = loaded.target.new_cache()
    batch = cache.batch([cache.allocate(len(ids))], [0])
    return loaded.target.forward(TreeBatch.chains([ids], loaded.target.device), cache, batch).scores


def check(folder, pack, quantization, chosen=lambda module: True, **fields):
    """Writes a model packed by `pack`, asserts that it reads as its float32 twin, logits too, and returns it opened."""
    stored, plain = packed_state(TINY, pack, chosen)
    write(folder / "packed", TINY, stored, quantization, **fields)
    write(folder / "plain", TINY, plain)
    checkpoint = open_checkpoint(folder / "packed")
    assert_reads_as(checkpoint, plain)
    ids = [5, 9, 200, 7, 31, 2]
    difference = logits(folder / "packed", ids) - logits(folder / "plain", ids)
    assert difference.abs().max() < 1e-4
    return checkpoint
