"""FP8 and int8 checkpoints: scales of the tensor, of rows, of groups and of blocks whose last ones are partial."""

import pytest
import torch

from specengine.models.checkpoint import open_checkpoint
from specengine.quantise.quantise import quantise
from tests.models.files import random_state
from tests.models.quantised.packing import TINY, check, grouped, logits, packed_state, words, write
from tests.models.quantised.packing_fp8 import blocks, spread
from tests.selection import looped

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
DOWN = "model.layers.1.mlp.down_proj.weight"


@looped("height, width, block", [(128, 128, [128, 128]), (48, 80, [48, 80]), (96, 32, [96, 32]), (128, 128, None)])
def test_blocks_cover_partial_rows_and_columns(height, width, block, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    coding = check(folder, blocks(height, width), {**FP8, "weight_block_size": block}).tensors[DOWN].coding
    assert (coding.kind, coding.group, coding.zeros) == ("e4m3", width, False)


def test_a_grid_is_not_divided_evenly_among_the_rows(tmp_path):
    even, _ = packed_state(
        TINY, blocks(96, 128), lambda module: "up_proj" in module
    )  # 192 rows as 96 + 96, not 128 + 64
    checkpoint = open_checkpoint(write(tmp_path / "m", TINY, even, {**FP8, "weight_block_size": [128, 128]}))
    up = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    wide = spread(even["model.layers.0.mlp.up_proj.weight_scale_inv"], 128, 128, up.shape)
    assert torch.equal(up, even["model.layers.0.mlp.up_proj.weight"].float() * wide)


@looped(
    "end, kind",
    [("weight_scale_inv", torch.bfloat16), ("weight_scale", torch.float32), ("scale", torch.float16)],
)
def test_every_name_and_type_of_a_scale_is_read(end, kind, tmp_path_factory):
    check(tmp_path_factory.mktemp("fp8"), blocks(128, 128, end, kind), {**FP8, "weight_block_size": [128, 128]})


@looped("shape", ["scalar", "one", "vector", "column"])
def test_scales_of_the_tensor_and_of_rows(shape, tmp_path_factory):
    def pack(weight):
        shapes = {"scalar": (), "one": (1,), "vector": (len(weight),), "column": (len(weight), 1)}
        scales = torch.rand(shapes[shape]) * 0.01 + 0.001
        wide = scales if scales.numel() == 1 else scales.view(-1, 1)
        stored = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scales}, stored.float() * wide

    checkpoint = check(tmp_path_factory.mktemp("fp8"), pack, {"quant_method": "fbgemm_fp8"})
    assert checkpoint.tensors[DOWN].coding.group == 192


@looped("kind", [torch.uint8, torch.float8_e8m0fnu])
def test_power_of_two_scales_come_as_their_exponents(kind, tmp_path_factory):
    def pack(weight):
        exponents = torch.randint(116, 124, (len(weight), weight.shape[1] // 32)).byte()
        wide = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
        stored = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale_inv": exponents.view(kind)}, stored.float() * wide

    assert check(tmp_path_factory.mktemp("m"), pack, FP8).tensors[DOWN].coding.group == 32


def test_e5m2_has_values_and_no_codes(tmp_path):
    pack = blocks(128, 128, codes=torch.float8_e5m2)
    assert check(tmp_path, pack, FP8).tensors[DOWN].coding is None


def test_blocks_that_kernels_cannot_take_have_values_and_no_codes(tmp_path):
    checkpoint = check(tmp_path, blocks(30, 50), {**FP8, "weight_block_size": [30, 50]})
    assert checkpoint.tensors[DOWN].coding is None
    with pytest.raises(ValueError, match="has no codes"):
        checkpoint.read_coded(DOWN, 0, 1)


def whole(shape):
    """Packs e4m3 with one scale in all, or one a row."""

    def pack(weight):
        scales = torch.rand((len(weight), 1) if shape == "column" else (1,)) * 0.01 + 0.001
        stored = (weight / scales).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scales}, stored.float() * scales

    return pack


COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"group_size": 64}}}}


@looped("shape", ["one", "column"])
@pytest.mark.parametrize("settings", [{**FP8, "weight_block_size": [128, 128]}, COMPRESSED], ids=["block", "group"])
def test_scales_that_cover_more_than_is_said_are_refused(settings, shape, tmp_path_factory):
    stored, _ = packed_state(TINY, whole(shape), lambda module: "down_proj" in module)
    with pytest.raises(
        ValueError, match=r"down_proj\.weight_scale' has shape .*, expected \(1(28, 3\) or \(1)?, 2\) for"
    ):
        open_checkpoint(write(tmp_path_factory.mktemp("fp8") / "m", TINY, stored, settings))


@looped("shape", [(1,), (-1, 1)])
def test_packed_words_with_fewer_scales_than_is_said_are_refused(shape, tmp_path_factory):
    def pack(weight):
        codes, _, scales, values = grouped(weight, 4, 64, symmetric=True)
        few = scales[:, :1] if len(shape) > 1 else scales[0, :1]
        return {
            "weight_packed": words(codes, 4),
            "weight_scale": few,
            "weight_shape": torch.tensor(weight.shape),
        }, values

    stored, _ = packed_state(TINY, pack, lambda module: "down_proj" in module)
    group = {"weights": {"num_bits": 4, "group_size": 64, "strategy": "group", "type": "int"}}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    with pytest.raises(ValueError, match=r"down_proj\.weight_scale' has shape .*, expected \(128, 3\) or"):
        open_checkpoint(write(tmp_path_factory.mktemp("packed") / "m", TINY, stored, settings))


def test_blocks_of_another_size_than_is_said_are_refused(tmp_path):
    stored, _ = packed_state(TINY, blocks(128, 128), lambda module: "down_proj" in module)
    with pytest.raises(ValueError, match=r"down_proj\.weight_scale_inv' has shape \(1, 2\), expected .*\(2, 3\) for"):
        open_checkpoint(write(tmp_path / "m", TINY, stored, {**FP8, "weight_block_size": [64, 64]}))


@looped("shape", ["one", "column"])
def test_modules_that_no_target_fits_may_have_any_scales(shape, tmp_path_factory):
    group = {"targets": ["re:.*up_proj"], "weights": {"group_size": 64}}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    check(tmp_path_factory.mktemp("fp8"), whole(shape), settings, lambda module: "down_proj" in module)


def test_the_type_that_the_configuration_names_is_that_of_the_weights(tmp_path):
    check(tmp_path, blocks(128, 128), {**FP8, "fmt": "e4m3"})
    stored, _ = packed_state(TINY, blocks(128, 128))
    with pytest.raises(
        ValueError, match=r"down_proj\.weight' has type float8_e4m3fn, expected float8_e5m2 as field 'fmt'"
    ):
        open_checkpoint(write(tmp_path / "m", TINY, stored, {**FP8, "fmt": "e5m2"}))


@pytest.mark.parametrize("coded", ["lm_head", "model.embed_tokens"])
def test_a_head_of_its_own_is_read_though_the_configuration_ties_it(coded, tmp_path):
    plain = random_state(TINY)
    tensors, values = whole("column")(plain[f"{coded}.weight"])
    stored = {name: tensor for name, tensor in plain.items() if name != f"{coded}.weight"}
    stored |= {f"{coded}.{end}": tensor for end, tensor in tensors.items()}
    folder = write(tmp_path / "m", TINY, stored, FP8, tie_word_embeddings=True)
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.config.tie_embeddings and torch.equal(checkpoint.read(f"{coded}.weight"), values)
    ids = [5, 9, 200]
    assert torch.equal(logits(folder, ids), logits(write(tmp_path / "n", TINY, stored, FP8), ids))
    quantise(folder, "int4-g128", tmp_path / "out")
    assert torch.equal(
        open_checkpoint(tmp_path / "out").read("lm_head.weight"), checkpoint.read("lm_head.weight").bfloat16()
    )
    quantise(folder, "q8_0", tmp_path / "out.gguf")
    assert not open_checkpoint(tmp_path / "out.gguf").config.tie_embeddings


def test_floats_stay_tied(tmp_path):
    stored, _ = packed_state(TINY, whole("column"))
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    assert open_checkpoint(write(tmp_path / "m", TINY, stored, FP8, tie_word_embeddings=True)).config.tie_embeddings


def test_scales_of_activations_and_caches_say_nothing_of_weights(tmp_path):
    ends = ("kv_cache_scaling_factor", "input_scale_inv", "activation_scale_inv", "k_scale", "output_scale")
    stored, plain = packed_state(TINY, whole("one"))
    stored |= {f"model.layers.0.self_attn.{part}{end}": torch.ones(1) for end in ends for part in ("", "k_proj.")}
    assert set(open_checkpoint(write(tmp_path / "m", TINY, stored, FP8)).tensors) == set(plain)


def test_int8_weights_take_the_scheme_of_8_bits_though_a_target_of_4_fits(tmp_path):
    def pack(weight):
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales

    fours = {"weights": {"num_bits": 4, "group_size": 64}}
    eights = {"targets": ["re:.*fused"], "weights": {"num_bits": 8, "strategy": "channel"}}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"a": fours, "b": eights}}
    check(tmp_path, pack, settings, lambda module: "down_proj" in module)


def test_int8_weights_of_bitsandbytes_are_scaled_by_rows(tmp_path):
    def pack(weight):
        peaks = weight.abs().amax(1)
        stored = (weight / peaks[:, None] * 127).round().to(torch.int8)
        tensors = {"weight": stored, "SCB": peaks, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, stored.float() * (peaks / 127)[:, None]

    coding = check(tmp_path, pack, {"load_in_8bit": True}).tensors[DOWN].coding
    assert (coding.kind, coding.group, coding.zeros) == ("int8", 192, True)


@pytest.mark.parametrize(
    "name, tensor, named",
    [
        ("weight_scale_inv", None, r"down_proj\.weight' has type float8_e4m3fn but no scale"),
        ("weight_scale_inv", torch.ones(3, 2), r"down_proj\.weight_scale_inv' has shape \(3, 2\), expected"),
        ("weight_scale_inv", torch.ones(1, 2).int(), r"down_proj\.weight_scale_inv' has type int32, expected float32"),
        ("weight_scale_inv", torch.ones(0), r"down_proj\.weight_scale_inv' has shape \(0,\)"),
        ("weight", torch.ones(128, 192), r"down_proj\.weight_scale_inv' belongs to no quantised weight"),
        ("weight", None, r"down_proj\.weight_scale_inv' belongs to no quantised weight"),
        ("weight", torch.ones(192).to(torch.float8_e4m3fn), r"down_proj\.weight' has shape \(192,\), expected 2"),
    ],
)
def test_tensors_that_do_not_belong_together_are_named(name, tensor, named, tmp_path):
    stored, _ = packed_state(TINY, blocks(128, 128))
    stored[f"model.layers.0.mlp.down_proj.{name}"] = tensor
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    with pytest.raises(ValueError, match=named):
        open_checkpoint(write(tmp_path / "m", TINY, stored, {**FP8, "weight_block_size": [128, 128]}))


@pytest.mark.parametrize("end, value", [("weight", "nan"), ("weight_scale_inv", "inf"), ("weight_scale_inv", "nan")])
def test_numbers_that_are_not_finite_are_refused_when_read(end, value, tmp_path):
    stored, _ = packed_state(TINY, blocks(128, 128))
    stored[f"{DOWN.removesuffix('weight')}{end}"].view(-1)[-1] = float(value)
    checkpoint = open_checkpoint(write(tmp_path / "m", TINY, stored, {**FP8, "weight_block_size": [128, 128]}))
    with pytest.raises(ValueError, match=rf"down_proj\.{end}' has"):
        checkpoint.read(DOWN)
    with pytest.raises(ValueError, match=rf"down_proj\.{end}' has"):
        checkpoint.read_coded(DOWN, 100, 128)
    assert torch.isfinite(checkpoint.read(DOWN.replace("down", "up"))).all()
