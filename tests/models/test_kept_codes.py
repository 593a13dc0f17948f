"""Models whose weights stay in a file's codes: close to their values as floats, and the same text with and without
drafts."""

from dataclasses import replace

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.config import MoeConfig
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.models.weights import WeightLoader
from specengine.ops import native
from specengine.ops.coded.rows import Coding
from specengine.tensor_parallel.loading import LoadedModel
from tests.engines import Oracle, ids
from tests.models.coded_checkpoint import CodedCheckpoint, logits_of
from tests.ops.coding import CODED

CPU = torch.device("cpu")
TINY = replace(PRESETS["tiny-llama"], hidden_size=128, intermediate_size=192, num_heads=4, head_dim=32)
PROMPTS = [[5, 9, 17, 5, 9, 4], [33, 2, 7, 7, 7, 250, 8], [1]]
# What int8 rows cost beside float rows, relative to the spread of the logits. The formats' own steps cost more: 4 bits
# 10 % and 8 bits of e4m3 3 % of a weight.
ERROR_OF_INT8_ROWS = 0.02


def checkpoint_of(form_of, order_of=lambda name, columns: None):
    def coding_of(name):
        return CODED.get(form_of(name)) if ".layers." in name or name == "lm_head" else None

    return CodedCheckpoint(RandomCheckpoint(TINY), coding_of, order_of)


def relative_error(checkpoint, prompt=tuple(range(40))):
    kept, floats = (load_transformer(checkpoint, dtype, CPU) for dtype in ("auto", "float32"))
    expected = logits_of(floats, list(prompt))
    return kept, float((logits_of(kept, list(prompt)) - expected).std() / expected.std())


def rule_of(name):
    """A checkpoint of several formats: each kind of matrix has its own."""
    forms = {"q_proj": "int4_128", "k_proj": "int4_128", "v_proj": "int8_32", "o_proj": "e4m3", "gate_proj": "e4m3"}
    return forms.get(name.rpartition(".")[2], "table4_16")


@pytest.mark.parametrize("form", [*CODED, "mixed"])
def test_logits_of_kept_codes_are_those_of_their_values(form):
    kept, error = relative_error(checkpoint_of(rule_of if form == "mixed" else lambda name: form))
    assert error < (1e-4 if form == "e4m3" else ERROR_OF_INT8_ROWS)
    assert form == "mixed" or kept.formats == {form, "float32"}  # the embedding stays as it is
    assert form != "mixed" or kept.formats >= {"int4_128", "int8_32", "e4m3", "table4_16"}


@pytest.mark.parametrize("form", ["int4_32", "int8_128"])
def test_codes_of_another_order_of_columns_have_the_values_of_their_own(form):
    def order_of(name, columns):  # equal for matrices that read the same rows, as their packers make them
        if "_proj" not in name:
            return None
        seed = 1 if "self_attn" in name and "o_proj" not in name else 2 if "mlp" in name else 3
        return torch.randperm(columns, generator=torch.Generator().manual_seed(seed))

    kept, error = relative_error(checkpoint_of(lambda name: form, order_of))
    assert error < ERROR_OF_INT8_ROWS and kept.formats == {form, "float32"}
    for layer in kept.weights.layers:
        assert all(part.columns is not None for part in layer.projections)


def test_matrices_that_share_rows_but_not_the_order_of_columns_become_floats():
    def order_of(name, columns):
        return torch.arange(columns).roll(2 if "v_proj" in name else 1) if "_proj" in name else None

    kept, error = relative_error(checkpoint_of(lambda name: "int4_32", order_of))
    layer = kept.weights.layers[0]
    assert error < ERROR_OF_INT8_ROWS
    assert {weight.format for weight in layer.qkv.weights} == {"float32"} and layer.qkv.columns is None
    assert layer.down.columns is not None and layer.down.weights[0].format == "int4_32"


@pytest.mark.parametrize("where", [".experts.", ".v_proj"])
def test_the_bytes_of_matrices_that_become_floats_for_their_order_are_known_before(where):
    def order_of(name, columns):
        return torch.arange(columns - 1, -1, -1) if where in name else None

    config = replace(PRESETS["tiny-qwen3-moe"], hidden_size=128, moe=MoeConfig(6, 2, 64))
    coded = CodedCheckpoint(
        RandomCheckpoint(config), lambda name: CODED["int4_32"] if "_proj" in name else None, order_of
    )
    loader = WeightLoader(coded, "auto", CPU, native)
    expected, model = loader.weight_bytes(), loader.model()
    products = [model.embedding, *([] if config.tie_embeddings else [model.head])]
    for layer in model.layers:
        products += [*layer.projections, layer.moe.gate_up, layer.moe.down]
    assert expected == pytest.approx(sum(product.nbytes for product in products), rel=0.05)  # without routers


@pytest.mark.parametrize("coding", [Coding("int4", 24, zeros=True), Coding("e4m3", 32)], ids=str)
def test_codes_that_no_kernel_reads_become_exact_floats(coding):
    checkpoint = CodedCheckpoint(RandomCheckpoint(TINY), lambda name: coding if "down_proj" in name else None)
    kept, error = relative_error(checkpoint)
    assert error < 1e-6 and kept.formats == {"float32"}


@pytest.mark.parametrize("form", [*CODED, "mixed", "ordered"])
def test_drafts_change_no_token_and_no_bit_of_a_logit(form):
    orders = {"ordered": lambda name, columns: torch.arange(columns - 1, -1, -1)}.get(form, lambda name, columns: None)
    forms = {"mixed": rule_of, "ordered": lambda name: "int4_32"}.get(form, lambda name: form)
    target = load_transformer(checkpoint_of(forms, orders), "auto", CPU)
    model = LoadedModel("coded", "auto", target, None, frozenset())
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3, logprobs=2)
        plain = Engine(model, drafter="none").generate(PROMPTS, params)
        answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
        drafters = ("prompt_lookup,adaptive=false", "lookahead,adaptive=false")
        for drafter in (*drafters, Oracle(answers, TINY.vocab_size, nodes=24)):
            drafted = Engine(model, drafter=drafter, max_batch_size=3).generate(PROMPTS, params)
            assert ids(drafted) == ids(plain), drafter
            assert [output.logprobs for output in drafted] == [output.logprobs for output in plain], drafter


@pytest.mark.parametrize("form", [*CODED, "mixed"])
def test_rows_of_floats_give_the_logits_of_float32_weights(form):
    checkpoint = checkpoint_of(rule_of if form == "mixed" else lambda name: form)
    kept, floats = (load_transformer(checkpoint, dtype, CPU) for dtype in ("auto-float32", "float32"))
    assert kept.formats == load_transformer(checkpoint, "auto", CPU).formats != {"float32"}
    found, expected = (logits_of(model, list(range(40))) for model in (kept, floats))
    if form in ("e4m3", "mixed"):  # its sums have another order
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("group", [16, 48])
def test_rows_of_floats_do_not_round_the_scales_of_small_groups(group):
    coding = Coding("int4", group, zeros=True)
    checkpoint = CodedCheckpoint(RandomCheckpoint(TINY), lambda name: coding if "down_proj" in name else None)
    rounded, kept, floats = (load_transformer(checkpoint, dtype, CPU) for dtype in ("auto", "auto-float32", "float32"))
    assert rounded.formats == {"int4_min16", "float32"} and kept.formats == {"float32"}
    assert torch.equal(logits_of(kept, list(range(40))), logits_of(floats, list(range(40))))


def test_scales_that_a_format_cannot_hold_are_refused_with_the_name_of_the_tensor():
    coding = Coding("int4", 16, zeros=True)
    checkpoint = CodedCheckpoint(RandomCheckpoint(TINY), lambda name: coding if "down_proj" in name else None)
    checkpoint._coded["model.layers.1.mlp.down_proj.weight"].scales[3] = 1e5
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight': scales of int4_min16 must be"):
        load_transformer(checkpoint, "auto", CPU)
    load_transformer(checkpoint, "auto-float32", CPU)


def test_a_weight_that_changed_a_little_is_seen():
    checkpoint = checkpoint_of(lambda name: "int4_128")
    floats = load_transformer(checkpoint, "float32", CPU)
    checkpoint._coded["model.layers.0.mlp.down_proj.weight"].scales[3] *= 3
    other = load_transformer(checkpoint, "auto", CPU)
    expected = logits_of(floats, list(range(40)))
    assert (logits_of(other, list(range(40))) - expected).std() / expected.std() > ERROR_OF_INT8_ROWS
