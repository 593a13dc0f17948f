"""Quantised folders of hybrids: codes of the layers of gated delta rule, beside gates that stay floats."""

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.models.checkpoint import open_checkpoint
from specengine.models.gated_delta.weights import IN_PROJECTIONS
from specengine.models.transformer import load_transformer
from specengine.models.weights import WeightLoader
from specengine.ops import native
from tests.drafters.mtp_files import mtp_state
from tests.engines import ids
from tests.models.coded_checkpoint import logits_of
from tests.models.hybrid_files import FAMILIES, write_hybrid
from tests.models.quantised.packed_hybrids import FORMATS, MLPS, SIZES, W4A16, write_packed
from tests.models.quantised.packing import gptq
from tests.selection import wide

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 17, 5, 9, 4, 5, 9], [33, 2, 7, 7, 7, 250, 8, 7]]
IDS = torch.randint(320, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def assert_logits_are_those_of(model, checkpoint):
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    found = logits_of(load_transformer(checkpoint, "float32", CPU), IDS)
    assert expected.std() > 0.1 and (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_matrices_read_as_their_values_and_give_the_logits_of_transformers(tmp_path, family, form):
    first = "model.language_model." if family == "qwen3_5" else "model."
    packed, plain, model = write_packed(tmp_path, family, form, first)
    checkpoint, values = open_checkpoint(packed), open_checkpoint(plain)
    assert checkpoint.tensors.keys() == values.tensors.keys()
    for name in values.tensors:
        rows = values.read(name)
        assert torch.equal(checkpoint.read(name).float(), rows.float()), name
        if checkpoint.tensors[name].coding is not None:
            for start, stop in ((0, len(rows)), (1, len(rows) - 1), (len(rows) // 3, len(rows) // 2), (3, 3)):
                assert torch.equal(checkpoint.read_coded(name, start, stop).values(), rows[start:stop]), name
    kinds = {name: info.coding and info.coding.kind for name, info in checkpoint.tensors.items()}
    layer, kind = "model.layers.0.linear_attn", FORMATS[form][2]
    assert [kinds[f"{layer}.{part}.weight"] for part in ("in_proj_qkv", "in_proj_z", "out_proj")] == [kind] * 3
    gates = [kinds[f"{layer}.{part}.weight"] for part in ("in_proj_b", "in_proj_a")]
    assert gates == [kind if family == "qwen3_next" else None] * 2
    assert_logits_are_those_of(model, checkpoint)


def test_the_library_of_compressed_tensors_packs_what_is_read(tmp_path):
    pytest.importorskip("compressed_tensors")
    from tests.models.quantised.compressed import group, write_compressed

    ignored = ["lm_head", "re:.*in_proj_(a|b|ba)$", "re:.*shared_expert_gate"]
    for family in FAMILIES:
        model = write_hybrid(tmp_path / family / "plain", family, **SIZES, **MLPS[family])
        model = write_compressed(tmp_path / family, [group(format="pack-quantized", **W4A16)], ignored, model)
        checkpoint = open_checkpoint(tmp_path / family)
        assert checkpoint.tensors["model.layers.0.linear_attn.in_proj_qkv.weight"].coding.kind == "int4"
        assert_logits_are_those_of(model, checkpoint)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", wide(FAMILIES))
def test_drafts_change_no_token_and_no_bit_of_a_logit(tmp_path, family, form):
    packed, _, _ = write_packed(tmp_path, family, form, more=lambda config: mtp_state(config, config.moe))
    for dtype in ("auto", "auto-float32", "int4"):
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=1)
        plain, *drafted = (
            Engine(packed, drafter=drafter, device="cpu", dtype=dtype).generate(PROMPTS, params)
            for drafter in ("none", "prompt_lookup,min_ngram=1,adaptive=false", "mtp,levels=2,top_k=3,adaptive=false")
        )
        for outputs in drafted:
            assert ids(outputs) == ids(plain)
            assert [output.logprobs for output in outputs] == [output.logprobs for output in plain]
            assert all(output.stats.acceptance_by_depth for output in outputs)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_floats_give_the_logits_of_float32_weights(tmp_path, form):
    checkpoint = open_checkpoint(write_packed(tmp_path, "qwen3_5", form)[0])
    kept, floats = (load_transformer(checkpoint, dtype, CPU) for dtype in ("auto-float32", "float32"))
    found, expected = (logits_of(model, IDS) for model in (kept, floats))
    assert [weight.format for weight in kept.weights.layers[0].qkv.weights][1:] == ["float32"]  # codes, then gates
    if form == "fp8 blocks":  # its sums have another order
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    else:
        assert torch.equal(found, expected)


def test_gates_take_the_order_of_columns_of_the_codes_beside_them(tmp_path):
    def act_order(weight):
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(9))
        return gptq(weight, order=order)

    for family in ("qwen3_5", "qwen3_next"):
        packed, plain, _ = write_packed(tmp_path / family, family, "gptq", pack=act_order)
        layer = WeightLoader(open_checkpoint(packed), "auto", CPU, native).layer(0)
        assert layer.qkv.columns is not None and layer.qkv.weights[0].format == "int4_32"
        values = open_checkpoint(plain)
        parts = [values.read(f"model.layers.0.linear_attn.{name}.weight") for name in IN_PROJECTIONS]
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
        found, expected = native.linear(x, layer.qkv), x @ torch.cat(parts).T
        for part, own in zip(
            found.split([len(each) for each in parts], 1), expected.split([len(each) for each in parts], 1), strict=True
        ):
            assert (part - own).std() < 0.02 * own.std()
