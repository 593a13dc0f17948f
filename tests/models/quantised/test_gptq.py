"""GPTQ checkpoints of both versions, all widths, with and without act-order."""

import json

import pytest
import torch

from specengine.models.checkpoint import open_checkpoint
from tests.models.quantised.packing import TINY, awq, check, gptq, grouped, packed_state, words, write
from tests.selection import looped

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
DOWN = "model.layers.1.mlp.down_proj.weight"


def shuffled(weight):
    return torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))


@looped("bits, version", [(bits, version) for bits in (2, 3, 4, 8) for version in (1, 2)])
def test_gptq_weights_read_as_what_was_packed(bits, version, tmp_path_factory):
    form = "gptq" if version == 1 else "gptq_v2"
    settings = {**GPTQ, "bits": bits, "checkpoint_format": form}
    folder = tmp_path_factory.mktemp("gptq")
    coding = check(folder, lambda weight: gptq(weight, bits, 64, version), settings).tensors[DOWN].coding
    assert (coding.kind, coding.group, coding.ordered) == ("int4" if bits <= 4 else "int8", 64, False)


def test_a_file_without_a_format_is_of_version_1(tmp_path):
    check(tmp_path, gptq, GPTQ)
    stored, plain = packed_state(TINY, lambda weight: gptq(weight, version=2))
    checkpoint = open_checkpoint(write(tmp_path / "m", TINY, stored, GPTQ))
    assert not torch.allclose(checkpoint.read(DOWN), plain[DOWN])


@looped("bits", [2, 3, 4, 8])
def test_act_order_comes_as_an_order_of_columns(bits, tmp_path_factory):
    settings = {**GPTQ, "bits": bits, "desc_act": True}
    folder = tmp_path_factory.mktemp("gptq")
    checkpoint = check(folder, lambda weight: gptq(weight, bits, 64, order=shuffled(weight)), settings)
    order = checkpoint.column_order(DOWN)
    assert checkpoint.tensors[DOWN].coding.ordered
    assert torch.equal(order.sort().values, torch.arange(192)) and not torch.equal(order, torch.arange(192))


def test_compressed_tensors_had_an_order_of_columns_too(tmp_path):
    def pack(weight):
        order = shuffled(weight)
        codes, zeros, scales, values = grouped(weight[:, order], 4, 64)
        back = order.argsort()
        named = {"weight_packed": words(codes[:, back], 4), "weight_zero_point": words(zeros.T, 4).T}
        shape = torch.tensor(weight.shape)
        named |= {"weight_scale": scales, "weight_shape": shape, "weight_g_idx": (back // 64).int()}
        return named, values[:, back]

    weights = {"num_bits": 4, "group_size": 64, "symmetric": False, "actorder": "group"}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    assert check(tmp_path, pack, settings).tensors[DOWN].coding.ordered


def test_groups_of_several_sizes_have_values_and_no_codes(tmp_path):
    def uneven(weight):
        columns = weight.shape[1]
        codes, zeros, scales, _ = grouped(weight, 4, 64)
        index = (torch.arange(columns) // 48).clamp(max=columns // 64 - 1)
        values = (codes - zeros[:, index]) * scales.float()[:, index]
        tensors = {
            "qweight": words(codes, 4).T,
            "qzeros": words(zeros.T - 1, 4),
            "scales": scales.T,
            "g_idx": index.int(),
        }
        return tensors, values

    assert check(tmp_path, uneven, GPTQ).tensors[DOWN].coding is None


def test_one_is_added_to_words_so_that_carries_undo_the_borrows_of_gptqmodel(tmp_path):
    def with_borrows(weight):
        codes, zeros, scales, _ = grouped(weight, 4, 64)
        zeros = zeros.clone()
        zeros[::8] = 0
        less = words(zeros.T.contiguous(), 4) - 0x11111111
        values = (codes.view(*zeros.shape, -1) - zeros[..., None]) * scales.float()[..., None]
        tensors = {"qweight": words(codes, 4).T, "qzeros": less, "scales": scales.T}
        return tensors, values.view(weight.shape)

    check(tmp_path, with_borrows, GPTQ)


def test_whole_rows_are_one_group_and_any_rows_can_be_read(tmp_path):
    def whole(weight):
        return gptq(weight, 3, weight.shape[1], order=shuffled(weight))

    checkpoint = check(tmp_path, whole, {**GPTQ, "bits": 3, "group_size": -1})
    assert checkpoint.tensors[DOWN].coding.group == 192
    rows = checkpoint.read(DOWN)
    for start in (0, 1, 31, 32, 33, 95):
        for stop in (start, start + 1, start + 32, 128):
            assert torch.equal(checkpoint.read_rows(DOWN, start, stop), rows[start:stop])


def test_an_index_of_zeros_stands_for_groups_in_order(tmp_path):
    def without_order(weight):
        tensors, values = gptq(weight)
        return {**tensors, "g_idx": torch.zeros_like(tensors["g_idx"])}, values

    assert not check(tmp_path, without_order, GPTQ).tensors[DOWN].coding.ordered


def test_an_integer_version_says_nothing_of_the_packing(tmp_path):
    check(tmp_path, gptq, {**GPTQ, "version": 1})


@pytest.mark.parametrize("pack, method", [(gptq, GPTQ), (awq, {**GPTQ, "quant_method": "awq"})])
def test_one_scale_a_row_is_refused_where_groups_are_said(pack, method, tmp_path):
    def truncated(weight):
        tensors, values = pack(weight)
        return {end: part[:1] if end in ("scales", "qzeros") else part for end, part in tensors.items()}, values

    stored, _ = packed_state(TINY, truncated)
    with pytest.raises(
        ValueError, match=r"down_proj\.scales' has 1 scales for 192 columns, expected 3 \(group size 64\)"
    ):
        open_checkpoint(write(tmp_path / "m", TINY, stored, method))


def test_a_weight_beside_its_codes_is_named(tmp_path):
    stored, plain = packed_state(TINY, gptq)
    stored[DOWN] = plain[DOWN]
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' lies beside the codes"):
        open_checkpoint(write(tmp_path / "m", TINY, stored, GPTQ))


def test_dynamic_rules_change_bits_and_groups_of_modules(tmp_path):
    stored, plain = packed_state(TINY, gptq, lambda module: ".1." not in module)
    eights, rest = packed_state(TINY, lambda weight: gptq(weight, 8, 32), lambda module: ".1.mlp." in module)
    eights = {name: tensor for name, tensor in eights.items() if ".1.mlp." in name}
    stored = {name: tensor for name, tensor in stored.items() if ".1.mlp." not in name} | eights
    plain |= {name: rest[name] for name in rest if ".1.mlp." in name}
    dynamic = {"-:.*\\.1\\.self_attn.*": {}, "+:model\\.layers\\.1\\.mlp.*": {"bits": 8, "group_size": 32}}
    checkpoint = open_checkpoint(write(tmp_path / "m", TINY, stored, {**GPTQ, "dynamic": dynamic}))
    for name, tensor in plain.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    assert checkpoint.tensors[DOWN].coding.kind == "int8"
    assert checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"].coding is None


def test_early_files_have_settings_of_their_own_and_biases_of_zeros(tmp_path):
    def with_bias(weight):
        tensors, values = gptq(weight)
        return {**tensors, "bias": torch.zeros(len(weight)).half()}, values

    stored, plain = packed_state(TINY, with_bias)
    folder = write(tmp_path / "m", TINY, stored)
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": False}))
    assert set(open_checkpoint(folder).tensors) == set(plain)
    stored["model.layers.0.mlp.up_proj.bias"] = torch.full((192,), 0.5).half()
    write(tmp_path / "m", TINY, stored)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.up_proj\.bias' is unexpected"):
        open_checkpoint(folder)


@looped(
    "packing, version",
    [
        *((name, 1) for name in ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_gptq:exllamav2", "auto")),
        *((name, 2) for name in ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2")),
    ],
)
def test_autoround_names_the_packing(packing, version, tmp_path_factory):
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "packing_format": packing}
    check(tmp_path_factory.mktemp("m"), lambda weight: gptq(weight, version=version), settings)


@looped("backend, version", [("auto_round:exllamav2", 2), ("auto_round:gptq:exllamav2", 1), ("gptq:marlin", 1)])
def test_older_files_of_autoround_name_it_as_the_backend(backend, version, tmp_path_factory):
    settings = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 64, "sym": False, "backend": backend}
    check(tmp_path_factory.mktemp("m"), lambda weight: gptq(weight, version=version), settings)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"checkpoint_format": "gptq_p"}, "'checkpoint_format' is 'gptq_p'"),
        ({"checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin'"),
        ({"is_marlin_format": True}, "'is_marlin_format'"),
        ({"bits": 5}, r"proj\.qweight' is said to have 5 bits"),
        ({"bits": None}, r"proj\.qweight' is said to have None bits"),
        ({"bits": 8}, r"down_proj\.g_idx' has 192 elements"),
        ({"group_size": 32}, r"down_proj\.scales' has 3 scales for 192 columns, expected 6"),
    ],
)
def test_settings_that_the_tensors_contradict_are_refused(changes, named, tmp_path):
    stored, _ = packed_state(TINY, gptq)
    with pytest.raises(ValueError, match=named):
        open_checkpoint(write(tmp_path / "m", TINY, stored, {**GPTQ, **changes}))


def test_a_group_index_out_of_range_is_refused(tmp_path):
    stored, _ = packed_state(TINY, gptq)
    stored["model.layers.0.mlp.up_proj.g_idx"][3] = 2
    with pytest.raises(ValueError, match=r"up_proj\.g_idx' has groups 0 to 2, expected 0 to 1"):
        open_checkpoint(write(tmp_path / "m", TINY, stored, GPTQ))
