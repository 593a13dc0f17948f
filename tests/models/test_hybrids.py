"""Hybrids of gated delta rule and attention: their configurations, and that readers give transformers' logits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import RandomCheckpoint, expected_tensors, open_checkpoint
from specengine.models.config_hf import config_from_hf
from specengine.models.gated_delta.gguf_config import gguf_gated_delta
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.models.weights import WeightLoader
from specengine.ops import native
from specengine.utils.json_fields import Fields
from tests.models.hybrid_files import FAMILIES, write_hybrid, write_hybrid_gguf

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_hybrid(folder, request.param)


def _ids(length):
    return torch.randint(320, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def _logits(checkpoint, ids):
    model = load_transformer(checkpoint, "float32", CPU)
    cache = model.new_cache()
    batch = cache.batch([cache.allocate(len(ids))], [0])
    return model.forward(TreeBatch.chains([ids], CPU), cache, batch).scores


def _agrees(checkpoint, model, length):
    with torch.inference_mode():
        expected = model(torch.tensor([_ids(length)])).logits[0]
    assert expected.std() > 0.1  # equal logits would prove nothing
    return (_logits(checkpoint, _ids(length)) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_defaults_are_those_of_transformers():
    for family, (config_class, _, _) in FAMILIES.items():
        theirs, ours = config_class(), config_from_hf({"model_type": family})
        delta = ours.gated_delta
        assert (ours.hidden_size, ours.num_layers, ours.head_dim) == (theirs.hidden_size, theirs.num_hidden_layers, 256)
        assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
        assert (ours.vocab_size, ours.rotary_dim, ours.attention_gate) == (theirs.vocab_size, 64, True)
        assert [layer in delta.layers for layer in range(ours.num_layers)] == [
            kind == "linear_attention" for kind in theirs.layer_types
        ]
        assert (delta.num_key_heads, delta.num_value_heads) == (16, 32)
        assert (delta.key_head_dim, delta.value_head_dim, delta.tiled) == (128, 128, False)
        if family != "qwen3_5":
            assert (ours.moe.num_experts, ours.moe.experts_per_token) == (
                theirs.num_experts,
                theirs.num_experts_per_tok,
            )
            assert (ours.moe.shared_size, ours.moe.shared_gate, ours.moe.renormalise) == (512, True, True)


def test_the_text_part_of_a_model_of_text_and_vision_is_read():
    inner = {"model_type": "qwen3_5_text", "num_hidden_layers": 8, "eos_token_id": 7}
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": inner, "dtype": "bfloat16"}
    config = config_from_hf({**outer, "tie_word_embeddings": True, "eos_token_id": 9})
    assert (config.num_layers, config.eos_token_ids, config.dtype, config.tie_embeddings) == (
        8,
        (7, 9),
        "bfloat16",
        True,
    )
    with pytest.raises(ValueError, match="text_config: field 'hidden_size' must be of type int"):
        config_from_hf({**outer, "text_config": {"hidden_size": "x"}})


def test_wrong_fields_are_named():
    for family, change, message in (
        ("qwen3_5", {"linear_conv_kernel_dim": 3}, "'linear_conv_kernel_dim' must be 4, got 3"),
        ("qwen3_5", {"full_attention_interval": 0}, "'full_attention_interval' must be positive"),
        ("qwen3_5", {"layer_types": ["full_attention"]}, "'layer_types' must name one of"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 32}, "'layer_types' must name full_attention"),
        ("qwen3_5", {"partial_rotary_factor": 2.0}, "'partial_rotary_factor' must be above 0"),
        (
            "qwen3_5",
            {"rope_parameters": {"partial_rotary_factor": 0.001}},
            "'partial_rotary_factor' must rotate an even",
        ),
        ("qwen3_5", {"linear_num_value_heads": 33}, "num_value_heads 33 must be a multiple"),
        ("qwen3_5", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
        ("qwen3_next", {"decoder_sparse_step": 0}, "'decoder_sparse_step' must be positive"),
        ("qwen3_next", {"mlp_only_layers": [48]}, "'mlp_only_layers' must list layers"),
        ("qwen4_exp", {}, "'model_type' must be one of .*, got 'qwen4_exp'"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_hf({"model_type": family, **change})


def test_settings_of_a_family_reach_the_configuration():
    rope = {"rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    config = config_from_hf({"model_type": "qwen3_5", "rope_parameters": {**rope, "partial_rotary_factor": 0.5}})
    assert config.rotary_dim == 128
    assert config_from_hf({"model_type": "qwen3_5", "partial_rotary_factor": 1.0}).rotary_dim is None
    biased = config_from_hf({"model_type": "qwen3_5", "attention_bias": True})
    assert biased.qkv_bias and biased.output_bias
    sparse = config_from_hf({"model_type": "qwen3_next", "norm_topk_prob": False, "mlp_only_layers": [3]})
    assert (sparse.moe.renormalise, sparse.moe.dense_layers) == (False, {3})


@pytest.mark.parametrize("length", [1, 3, 70, 200])
def test_the_tensors_that_are_read_give_the_logits_of_transformers(written, length):
    folder, model = written
    assert _agrees(open_checkpoint(folder), model, length)


def test_greedy_tokens_are_those_of_transformers(written):
    folder, model = written
    output = Engine(folder, drafter="prompt_lookup,min_ngram=1", device="cpu", dtype="float32").generate(
        _ids(12), SamplingParams(max_new_tokens=64, ignore_eos=True)
    )
    with torch.inference_mode():
        logits = model(torch.tensor([_ids(12) + output.token_ids])).logits[0, 11:-1]
    assert output.token_ids == logits.argmax(-1).tolist()


@pytest.mark.full
def test_weights_of_8_and_4_bits_change_no_token_under_speculation(written):
    for dtype in ("int8", "int4", "bfloat16"):
        prompt, params = _ids(5) * 3, SamplingParams(max_new_tokens=32, ignore_eos=True, logprobs=1)
        plain, drafted = (
            Engine(written[0], drafter=drafter, device="cpu", dtype=dtype).generate(prompt, params)
            for drafter in ("none", "prompt_lookup,min_ngram=1,adaptive=false")
        )
        assert plain.token_ids == drafted.token_ids
        assert plain.logprobs == drafted.logprobs


def test_rows_are_the_same_however_they_are_cut(written):
    checkpoint = open_checkpoint(written[0])
    for name in checkpoint.tensors:
        if "linear_attn" in name:
            rows = [checkpoint.read_rows(name, i, i + 1) for i in range(checkpoint.tensors[name].shape[0])]
            assert torch.equal(torch.cat(rows), checkpoint.read(name))


def test_a_wrapper_with_vision_and_a_drafter_is_the_same_text_model(written, tmp_path):
    folder, model = written
    tensors = load_file(folder / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    aside = {"mtp.fc.weight": torch.ones(2, 2), "model.visual.patch_embed.weight": torch.ones(2, 2)}
    _write(tmp_path, folder, wrapped | aside)
    assert _agrees(open_checkpoint(tmp_path), model, 9)
    _write(tmp_path, folder, wrapped | {"model.stranger.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"'model.stranger.weight' is unexpected"):
        open_checkpoint(tmp_path)
    _write(tmp_path, folder, tensors | {"model.language_model.norm.weight": torch.ones(64)})
    with pytest.raises(ValueError, match=r"both are 'model.norm.weight'"):
        open_checkpoint(tmp_path)


def test_a_tensor_of_another_size_is_named(written, tmp_path):
    tensors = load_file(written[0] / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.0.linear_attn.")]:
        _write(tmp_path, written[0], {**tensors, name: tensors[name][:-1].clone()})
        with pytest.raises(ValueError, match="has shape"):
            open_checkpoint(tmp_path)


def test_the_loader_packs_layers_of_both_kinds(written):
    checkpoint = open_checkpoint(written[0])
    loader = WeightLoader(checkpoint, "auto", CPU, native)
    layer, config = loader.layer(0), checkpoint.config
    delta = layer.gated_delta
    assert layer.qkv.rows == config.gated_delta.conv_channels + 4 * 24 + 4 + 4
    assert torch.equal(delta.conv[3], checkpoint.read("model.layers.0.linear_attn.conv1d.weight")[:, 0, 3])
    assert (delta.decay < 0).all() and (delta.key_heads, delta.value_heads) == (2, 4)
    attention = loader.layer(3)
    assert attention.gated_delta is None and attention.qkv.rows == (2 * 4 + 2 * 2) * 32
    assert attention.q_norm is not None and layer.q_norm is None


def test_random_hybrids_have_all_tensors_and_decays_in_range():
    for preset in ("tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next"):
        checkpoint = RandomCheckpoint(PRESETS[preset])
        assert set(checkpoint.tensors) == set(expected_tensors(PRESETS[preset]))
        decay = checkpoint.read("model.layers.0.linear_attn.decay")
        assert (decay <= -0.0099).all() and (decay >= -16.1).all() and len(decay.unique()) == 4
        assert _logits(checkpoint, _ids(5)).isfinite().all()


def _write(folder: Path, source: Path, tensors):
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("fused", [False, True])
def test_a_gguf_file_of_a_mixture_gives_the_same_logits(tmp_path, fused):
    model = write_hybrid(tmp_path / "folder", "qwen3_5_moe")
    path = write_hybrid_gguf(tmp_path / "mixture.gguf", open_checkpoint(tmp_path / "folder"), fused=fused)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.config.moe.num_experts, checkpoint.config.moe.shared_size) == (8, 80)
    assert _agrees(checkpoint, model, 70)


def test_a_gguf_file_of_tiled_heads_gives_the_same_logits(tmp_path):
    folder = tmp_path / "folder"
    model = write_hybrid(folder, "qwen3_5")
    stored = open_checkpoint(folder)
    path = write_hybrid_gguf(tmp_path / "plain.gguf", stored)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.gated_delta.tiled and checkpoint.config.rotary_dim == 8
    assert _agrees(checkpoint, model, 70)
    checkpoint.config = replace(checkpoint.config, gated_delta=replace(checkpoint.config.gated_delta, tiled=False))
    assert not _agrees(checkpoint, model, 70)
    extra = [("blk.8.nextn.eh_proj.weight", torch.ones(64, 128)), ("blk.8.attn_q.weight", torch.ones(256, 64))]
    drafted = open_checkpoint(write_hybrid_gguf(tmp_path / "drafted.gguf", stored, extra))
    assert drafted.tensors == checkpoint.tensors


def test_a_gguf_file_may_say_which_layers_have_states(tmp_path):
    types = [f"{kind}_attention" for kind in ("linear", "full", "full", "linear")]
    model = write_hybrid(tmp_path / "folder", "qwen3_5", num_hidden_layers=4, layer_types=types)
    extra = [("blk.4.nextn.eh_proj.weight", torch.ones(64, 128))]
    checkpoint = open_checkpoint(write_hybrid_gguf(tmp_path / "m.gguf", open_checkpoint(tmp_path / "folder"), extra))
    assert checkpoint.config.gated_delta.layers == {0, 3}
    assert _agrees(checkpoint, model, 9)
    for flags in ([True] * 3, [0.5] * 4):
        with pytest.raises(ValueError, match=r"'qwen35.attention.recurrent_layers' must have a flag for each of 4"):
            gguf_gated_delta(
                Fields({**checkpoint.metadata, "qwen35.attention.recurrent_layers": flags}, "m"), "qwen35", 4
            )
