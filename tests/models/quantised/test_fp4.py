"""NVFP4 and MXFP4 under ModelOpt's names, and 4-bit bitsandbytes."""

import json

import pytest
import torch

from specengine.models.checkpoint import open_checkpoint
from tests.models.quantised.packing import TINY, check, packed_state, write
from tests.models.quantised.packing_fp4 import bitsandbytes4, e2m1, mxfp4, nvfp4
from tests.selection import looped

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
DOWN = "model.layers.1.mlp.down_proj.weight"


def test_modelopt_multiplies_by_the_scale_of_the_tensor(tmp_path):
    coding = check(tmp_path, nvfp4, MODELOPT).tensors[DOWN].coding
    assert (coding.kind, coding.group) == ("e2m1", 16)


def test_compressed_tensors_divides_by_it(tmp_path):
    def divided(weight):
        tensors, _ = nvfp4(weight)
        tensor_wide = 1 / tensors.pop("weight_scale_2").view(1)
        scales = tensors["weight_scale"].float() / tensor_wide
        packed, values = e2m1(weight, scales)
        named = {"weight_packed": packed, "weight_scale": tensors["weight_scale"], "weight_global_scale": tensor_wide}
        return named, values

    check(tmp_path, divided, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})


def test_powers_of_two_are_scales_of_32_columns(tmp_path):
    assert check(tmp_path, mxfp4, {"quant_method": "mxfp4"}).tensors[DOWN].coding.group == 32


def test_modules_of_two_formats_lie_in_one_file(tmp_path):
    def fp8(weight):
        codes = (weight / 0.01).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": torch.tensor(0.01)}, codes.float() * 0.01

    fours, plain = packed_state(TINY, nvfp4, lambda module: "mlp" in module)
    eights, plain_eights = packed_state(TINY, fp8, lambda module: "self_attn" in module)
    stored = {name: tensor for name, tensor in fours.items() if "self_attn" not in name}
    stored |= {name: tensor for name, tensor in eights.items() if "self_attn" in name}
    plain |= {name: tensor for name, tensor in plain_eights.items() if "self_attn" in name}
    folder = write(tmp_path / "m", TINY, stored)
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (folder / "hf_quant_config.json").write_text(json.dumps(mixed))
    checkpoint = open_checkpoint(folder)
    for name, tensor in plain.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"].coding.kind == "e4m3"
    assert checkpoint.tensors[DOWN].coding.kind == "e2m1"


@pytest.mark.parametrize(
    "pack, end, tensor, named",
    [
        (nvfp4, "weight_scale_2", None, r"'weight_scale_2' is missing beside NVFP4's"),
        (nvfp4, "weight_scale", None, r"weight_scale' is missing"),
        (nvfp4, "weight_scale", torch.ones(128, 12), r"weight_scale' has type float32"),
        (nvfp4, "weight_scale_2", torch.ones(128), r"weight_scale_2' has shape \(128,\), expected one number"),
        (nvfp4, "weight_scale_2", torch.tensor(float("inf")), r"weight_scale_2' has values that are not finite"),
        (nvfp4, "weight_global_scale", torch.ones(1), "are both there"),
        (
            mxfp4,
            "weight_packed",
            torch.ones(128, 96).byte(),
            r"down_proj\.weight' lies beside the codes of weight_packed",
        ),
        (mxfp4, "weight_scale_2", torch.ones(()), r"weight_scale_2' is not MXFP4's"),
        (mxfp4, "weight_scale", torch.ones(128, 5).byte(), r"weight_scale' has shape \(128, 5\), expected \(128, 6\)"),
    ],
)
def test_scales_that_do_not_fit_are_named(pack, end, tensor, named, tmp_path):
    stored, _ = packed_state(TINY, pack)
    stored[f"model.layers.0.mlp.down_proj.{end}"] = tensor
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    with pytest.raises(ValueError, match=named):
        open_checkpoint(write(tmp_path / "m", TINY, stored, MODELOPT))


def test_a_weight_of_bitsandbytes_without_its_other_tensors_is_named(tmp_path):
    stored, _ = packed_state(TINY, bitsandbytes4())
    stored = {name: tensor for name, tensor in stored.items() if "0.mlp.down_proj.weight." not in name}
    with pytest.raises(ValueError, match=r"0\.mlp\.down_proj\.weight\.quant_state\.bitsandbytes__nf4' is missing"):
        open_checkpoint(write(tmp_path / "m", TINY, stored, {"quant_method": "bitsandbytes", "load_in_4bit": True}))


def test_an_exponent_of_all_ones_is_no_scale(tmp_path):
    stored, _ = packed_state(TINY, mxfp4)
    stored[f"{DOWN}_scale"][7, 2] = 255
    checkpoint = open_checkpoint(write(tmp_path / "m", TINY, stored, MODELOPT))
    assert torch.isfinite(checkpoint.read_rows(DOWN, 0, 7)).all()
    with pytest.raises(ValueError, match=r"down_proj\.weight_scale' has values that are not finite"):
        checkpoint.read_rows(DOWN, 7, 8)


@looped("block, nested, storage", [(64, False, torch.uint8), (64, True, torch.uint8), (256, True, torch.bfloat16)])
def test_bitsandbytes_blocks_run_along_the_flat_weight(block, nested, storage, tmp_path_factory):
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    checkpoint = check(tmp_path_factory.mktemp("m"), bitsandbytes4(block, nested, storage), settings)
    assert checkpoint.tensors[DOWN].coding is None


@pytest.mark.parametrize(
    "end, tensor, named",
    [
        ("weight.absmax", None, r"weight\.absmax' is missing"),
        ("weight.absmax", torch.ones(3), r"weight\.absmax' has shape \(3,\), expected \(384,\)"),
        ("weight.quant_map", torch.ones(15), r"quant_map' has shape"),
        ("weight.quant_state.bitsandbytes__nf4", torch.tensor([*b"{"]).byte(), "is no JSON"),
        ("weight.quant_state.bitsandbytes__nf4", torch.tensor([*b"[]"]).byte(), "expected an object of fields"),
        ("weight.quant_state.bitsandbytes__nf4", torch.tensor([*b'{"shape": [1, true]}']).byte(), "'shape' must be"),
        ("weight.quant_state.bitsandbytes__nf4", torch.tensor([*b'{"shape": [9, 9]}']).byte(), "does not hold"),
        ("weight.quant_state.bitsandbytes__nf4", None, "nf4' is missing"),
    ],
)
def test_bitsandbytes_tensors_that_do_not_fit_are_named(end, tensor, named, tmp_path):
    stored, _ = packed_state(TINY, bitsandbytes4())
    stored[f"model.layers.0.mlp.down_proj.{end}"] = tensor
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    with pytest.raises(ValueError, match=named):
        open_checkpoint(write(tmp_path / "m", TINY, stored, {"load_in_4bit": True}))
