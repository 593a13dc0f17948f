"""Adapters of hybrids: logits are those of peft, and who shares a batch never shows."""

import dataclasses
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import open_checkpoint
from specengine.models.lora.adapters import load_adapters
from specengine.models.lora.folder import read_lora
from specengine.models.transformer import load_transformer
from tests.engines import ids
from tests.models.hybrid_files import FAMILIES, write_hybrid, write_hybrid_gguf

IDS = [5, 9, 33, 77, 100, 200, 3, 17, 250, 41]
CPU = torch.device("cpu")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
RECURRENT = {
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    "qwen3_5_moe": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
}
MLP = {"qwen3_5": ["gate_proj", "up_proj", "down_proj"]}
CHOICES = ("a", None, "b", "a")
PROMPTS = [[3 + i, 9, 27, 81, 3 + i, 9, 27, 40 + i] for i in range(len(CHOICES))]


def modules_of(family):
    return ATTENTION + RECURRENT[family] + MLP.get(family, [])


def adapter_of(model, folder, seed=1, **config):
    """Saves a random adapter as peft does; returns peft's logits and those of the bare model."""
    wrapped = get_peft_model(model, LoraConfig(**{"r": 5, "lora_alpha": 12, **config}))
    torch.manual_seed(seed)
    with torch.inference_mode():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15)
        wrapped.save_pretrained(folder)
        expected = wrapped(torch.tensor([IDS])).logits[0]
        with wrapped.disable_adapter():
            bare = wrapped(torch.tensor([IDS])).logits[0]
    wrapped.unload()
    return expected, bare


def logits(checkpoint, folder):
    target = load_transformer(checkpoint, "float32", CPU)
    target = target.with_lora(load_adapters({"x": folder}, target).layers)
    return [_scores(target, adapter) for adapter in (0, -1)]


def _scores(target, adapter):
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(IDS))], [0], [adapter])
    return target.forward(TreeBatch.chains([IDS], CPU), cache, batch).scores


def differs_by(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="module", params=FAMILIES)
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, write_hybrid(folder, request.param, num_hidden_layers=4)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    model = write_hybrid(folder, "qwen3_5", num_hidden_layers=4)
    adapters = {name: folder / name for name in ("a", "b")}
    adapter_of(model, adapters["a"], 1, target_modules=modules_of("qwen3_5"))
    adapter_of(model, adapters["b"], 2, r=20, target_modules=["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"])
    return folder, model, adapters


def test_logits_of_every_family_are_those_of_peft(written, tmp_path):
    family, folder, model = written
    expected, bare = adapter_of(model, tmp_path, target_modules=modules_of(family))
    adapted, without = logits(open_checkpoint(folder), tmp_path)
    assert differs_by(bare, expected) > 0.05
    assert differs_by(adapted, expected) < 1e-4
    assert differs_by(without, bare) < 1e-4


def test_every_module_of_the_recurrence_counts_alone(written, tmp_path):
    family, folder, model = written
    for module in RECURRENT[family]:
        expected, bare = adapter_of(model, tmp_path / module, target_modules=[module])
        assert differs_by(bare, expected) > 1e-3, module
        assert differs_by(logits(open_checkpoint(folder), tmp_path / module)[0], expected) < 1e-4, module


def test_settings_that_select_modules_mean_what_they_mean_to_peft(dense, tmp_path):
    folder, model, _ = dense
    for number, config in enumerate(
        (
            {"target_modules": "all-linear"},
            {"target_modules": r".*\.1\.linear_attn\.in_proj_(z|b)", "rank_pattern": {"in_proj_z": 17}},
            {"target_modules": ["out_proj", "up_proj"], "layers_to_transform": [0, 3]},
        )
    ):
        expected, bare = adapter_of(model, tmp_path / str(number), **config)
        assert differs_by(bare, expected) > 1e-3, config
        assert differs_by(logits(open_checkpoint(folder), tmp_path / str(number))[0], expected) < 1e-4, config


def test_a_gguf_model_of_tiled_heads_takes_the_adapter_of_its_folder(dense, tmp_path):
    folder, model, _ = dense
    expected, _ = adapter_of(model, tmp_path / "adapter", target_modules=modules_of("qwen3_5"))
    checkpoint = open_checkpoint(write_hybrid_gguf(tmp_path / "model.gguf", open_checkpoint(folder)))
    assert differs_by(logits(checkpoint, tmp_path / "adapter")[0], expected) < 1e-4


def test_adapters_of_grouped_heads_are_refused_for_tiled_ones(dense, tmp_path):
    """Their matrices have the same shapes, and rows of another order."""
    folder, _, adapters = dense
    tiled = open_checkpoint(write_hybrid_gguf(tmp_path / "model.gguf", open_checkpoint(folder)))
    grouped_model, tiled_model = (load_transformer(each, "float32", CPU) for each in (open_checkpoint(folder), tiled))
    loaded = load_adapters(adapters, grouped_model)
    loaded.check_fits(grouped_model)
    with pytest.raises(ValueError, match=r"^adapters: they were loaded for a model of other sizes"):
        loaded.check_fits(tiled_model)


def test_an_adapter_of_a_model_of_text_and_vision_is_the_same(dense, tmp_path):
    folder, model, _ = dense
    adapter_of(
        model, tmp_path, target_modules=r".*language_model\.layers\.\d\.(linear_attn\.in_proj_z|mlp\.up_proj)|.*z"
    )
    config = open_checkpoint(folder).config
    plain = read_lora(tmp_path, config)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    wrapped = {name.replace("model.layers", "model.language_model.layers"): each for name, each in tensors.items()}
    for layer in range(4):
        name = f"base_model.model.model.language_model.layers.{layer}.mlp.up_proj"
        wrapped |= {f"{name}.lora_A.weight": torch.ones(5, 64), f"{name}.lora_B.weight": torch.ones(160, 5)}
    save_file(wrapped, tmp_path / "adapter_model.safetensors")
    found = read_lora(tmp_path, config)
    assert found.keys() - plain.keys() == {f"model.layers.{layer}.mlp.up_proj" for layer in range(4)}
    assert plain and all(torch.equal(found[name].b, plain[name].b) for name in plain)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_mixed_batch_and_drafts_have_the_bits_of_plain_single_runs(dense, dtype):
    folder, _, adapters = dense
    sampled = SamplingParams(max_new_tokens=16, temperature=0.8, seed=5, logprobs=3, ignore_eos=True)
    params = [dataclasses.replace(sampled, adapter=name) for name in CHOICES]
    engine = Engine(folder, drafter="none", device="cpu", dtype=dtype, adapters=adapters, prefix_cache_mib=0)
    alone = [engine.generate(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    bare = Engine(folder, drafter="none", device="cpu", dtype=dtype).generate(PROMPTS, sampled)
    for drafter in ("none", "prompt_lookup,min_ngram=1,adaptive=false"):
        together = Engine(folder, drafter=drafter, device="cpu", dtype=dtype, adapters=adapters)
        for _ in range(2):  # the second time prefixes are found
            outputs = together.generate(PROMPTS, params)
            assert ids(outputs) == ids(alone)
            assert [output.logprobs for output in outputs] == [output.logprobs for output in alone]
    same = [output.logprobs == without.logprobs for output, without in zip(outputs, bare, strict=True)]
    assert same == [name is None for name in CHOICES]


def test_states_of_one_adapter_are_never_found_by_another(dense):
    folder, _, adapters = dense
    prompt = [(7 * i) % 300 + 3 for i in range(70)]
    answers = []
    for mib in (0, 64):
        engine = Engine(folder, drafter="none", device="cpu", adapters=adapters, prefix_cache_mib=mib)
        said = [
            engine.generate(prompt, SamplingParams(max_new_tokens=8, adapter=name, ignore_eos=True))
            for name in (None, "a", "b", "a", None)
        ]
        answers.append([output.token_ids for output in said])
        hits = [output.stats.prefix_hit_tokens > 0 for output in said]
        assert hits == ([False] * 5 if mib == 0 else [False, False, False, True, True])
    assert answers[0] == answers[1] and len({tuple(each) for each in answers[0]}) == 3


def test_modules_that_cannot_be_adapted_are_refused_by_name(dense, tmp_path):
    folder, model, _ = dense
    config = open_checkpoint(folder).config
    adapter_of(model, tmp_path, target_modules=["q_proj"])
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "target_modules": ["q_proj", "conv1d"]}))
    with pytest.raises(ValueError, match=r"adapts layers\.0\.linear_attn\.conv1d; supported are q_proj, .*in_proj_a"):
        read_lora(tmp_path, config)
    adapter_of(model, tmp_path, target_modules=["in_proj_z"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.linear_attn.in_proj_z.lora_B.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"in_proj_z.lora_B.weight' has shape \(95, 5\), expected \(96, 5\)"):
        read_lora(tmp_path, config)
