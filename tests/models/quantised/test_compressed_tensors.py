"""Checkpoints that the compressed-tensors library packs give what the library unpacks."""

import json
import sys

import pytest
import torch

from specengine.models.checkpoint import open_checkpoint
from tests.models.quantised.packing import logits
from tests.selection import wide

pytest.importorskip("compressed_tensors")

from tests.models.quantised.compressed import group, write_compressed

INTS = {"type": "int", "strategy": "group", "group_size": 32}
FORMATS = {
    "w4a16": (group(num_bits=4, **INTS), "int4"),
    "w4a16 asymmetric": (group(num_bits=4, symmetric=False, **INTS), "int4"),
    "w4 by rows": (group(num_bits=4, type="int", strategy="channel"), "int4"),
    "w8a16 asymmetric": (group(num_bits=8, symmetric=False, **INTS), "int8"),
    "w3a16": (group(num_bits=3, symmetric=False, **INTS), "int4"),
    "w6a16": (group(num_bits=6, symmetric=False, **INTS), "int8"),
    "w4 of the tensor": (group(num_bits=4, type="int", strategy="tensor", symmetric=False), "int4"),
    "w8a8": (group("int-quantized", num_bits=8, type="int", strategy="channel"), "int8"),
    "w8a8 asymmetric": (group("int-quantized", num_bits=8, symmetric=False, **INTS), "int8"),
    "fp8": (group("float-quantized", num_bits=8, type="float", strategy="tensor"), "e4m3"),
    "fp8 by rows": (group("float-quantized", num_bits=8, type="float", strategy="channel"), "e4m3"),
    "fp8 blocks": (
        group("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 80]),
        "e4m3",
    ),
    "mxfp4": (
        group(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
        ),
        "e2m1",
    ),
    "mxfp8": (
        group("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
        "e4m3",
    ),
}
if sys.version_info >= (3, 11):  # the library's last release for Python 3.10 has no MXFP6
    microscales = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    FORMATS["mxfp6"] = (group("mxfp6-pack-quantized", num_bits=6, **microscales), None)
NVFP4 = {
    "format": "nvfp4-pack-quantized",
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}


def assert_reads_as(checkpoint, model):
    for name, tensor in model.state_dict().items():
        if name in checkpoint.tensors:
            rows = checkpoint.read(name)
            assert torch.equal(rows.float(), tensor.float()), name
            assert torch.equal(checkpoint.read_rows(name, 3, 50).float(), rows[3:50].float())
            if checkpoint.tensors[name].coding is not None:
                assert torch.equal(checkpoint.read_coded(name, 3, 50).values(), rows[3:50])


def assert_logits_agree(model, folder):
    ids = torch.randint(320, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model.float()(torch.tensor([ids])).logits[0]
    assert (logits(folder, ids) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", wide(FORMATS, 3))
def test_packed_weights_read_as_the_library_unpacks_them(name, tmp_path):
    scheme, kind = FORMATS[name]
    model = write_compressed(tmp_path, [scheme])
    checkpoint = open_checkpoint(tmp_path)
    codings = {tensor: info.coding for tensor, info in checkpoint.tensors.items()}
    assert codings["lm_head.weight"] is None
    down = codings["model.layers.1.mlp.down_proj.weight"]
    assert kind is None or "blocks" in name or (down is not None and down.kind == kind)
    assert_reads_as(checkpoint, model)
    assert_logits_agree(model, tmp_path)


def test_nvfp4_reads_as_the_library_unpacks_it_but_for_its_bfloat16(tmp_path):
    model = write_compressed(tmp_path, [group(**NVFP4)])
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.tensors[name].coding.group == 16
    rows = checkpoint.read(name)
    unpacked = model.state_dict()[name]
    assert unpacked.dtype == torch.bfloat16 and torch.equal(rows.bfloat16(), unpacked)
    assert not torch.equal(rows, unpacked.float())
    assert torch.equal(checkpoint.read_coded(name, 5, 9).values(), rows[5:9])


def test_each_module_has_the_format_of_its_config_group(tmp_path):
    attention = group("float-quantized", ["re:.*self_attn.*"], num_bits=8, type="float", strategy="channel")
    one = "model.layers.1.mlp.down_proj"
    exact = group("pack-quantized", [one], num_bits=8, **INTS)
    rest = group("pack-quantized", num_bits=4, **INTS)
    model = write_compressed(tmp_path, [rest, attention, exact], ["model.layers.0.self_attn.q_proj"])
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert quantization["format"] == "mixed-precision"
    checkpoint = open_checkpoint(tmp_path)
    kinds = {name: info.coding and info.coding.kind for name, info in checkpoint.tensors.items()}
    assert kinds[f"{one}.weight"] == "int8"
    assert kinds["model.layers.0.mlp.down_proj.weight"] == kinds["lm_head.weight"] == "int4"
    assert kinds["model.layers.0.self_attn.k_proj.weight"] == "e4m3"
    assert kinds["model.layers.0.self_attn.q_proj.weight"] is None
    assert_reads_as(checkpoint, model)
    assert_logits_agree(model, tmp_path)


def test_the_older_name_of_the_configuration_and_regexes_in_ignore_are_read(tmp_path):
    write_compressed(tmp_path, [group(num_bits=4, **INTS)], ["lm_head", "re:.*down_proj$"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    config["compression_config"]["ignore"] = ["re:.*lm_head", "re:.*down_proj$"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = open_checkpoint(tmp_path).tensors
    assert tensors["model.layers.0.mlp.up_proj.weight"].coding.kind == "int4"
    assert tensors["model.layers.0.mlp.down_proj.weight"].coding is None
