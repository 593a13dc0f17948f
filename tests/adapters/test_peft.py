"""Logits with an adapter are those of the peft library, in float32, for tiny models written by transformers."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from specengine.draft_trees.tree import TreeBatch
from specengine.models.lora.adapters import load_adapters
from specengine.tensor_parallel.loading import load_model
from tests.adapters.files import MODULES
from tests.models.gguf_files import write_gguf

IDS = [5, 9, 33, 77, 100, 200, 3]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 72,
    "intermediate_size": 300,  # more than one chunk of columns
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
KINDS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
CASES = {
    "all seven": {"target_modules": MODULES},
    "rank_pattern": {"target_modules": MODULES, "rank_pattern": {"1.self_attn.q_proj": 20, "up_proj": 33, "k_proj": 1}},
    "alpha_pattern": {"target_modules": MODULES, "alpha_pattern": {"layers.0.mlp.down_proj": 3, r"[qv]_proj": 40}},
    "the first pattern that fits": {"target_modules": MODULES, "rank_pattern": {"0.self_attn.q_proj": 2, "q_proj": 9}},
    "rslora": {"target_modules": MODULES, "use_rslora": True, "rank_pattern": {"v_proj": 8}},
    "regex": {"target_modules": r".*\.1\.(self_attn\.[qo]_proj|mlp\.up_proj)"},
    "some layers": {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [1]},
    "a pattern of layers": {"target_modules": ["v_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "exclusion": {"target_modules": MODULES, "exclude_modules": ["layers.0.self_attn.q_proj", "down_proj"]},
    "all-linear": {"target_modules": "all-linear"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders and models of the three families."""
    made = {}

    def make(kind):
        if kind not in made:
            torch.manual_seed(0)
            config = getattr(transformers, f"{KINDS[kind]}Config")(**SIZES, tie_word_embeddings=kind == "qwen2")
            model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config).float().eval()
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder)
            made[kind] = folder, load_model(folder)
        return made[kind]

    return make


def random_adapter(folder, adapter, kind, **config):
    """Saves a random adapter of a model as peft does; returns peft's logits and those of the bare model."""
    model = getattr(transformers, f"{KINDS[kind]}ForCausalLM").from_pretrained(folder)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 5, "lora_alpha": 12, **config}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.1)
    wrapped.save_pretrained(adapter)
    bare = getattr(transformers, f"{KINDS[kind]}ForCausalLM").from_pretrained(folder)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(bare, adapter)(torch.tensor([IDS])).logits[0]
        with wrapped.disable_adapter():
            return expected, wrapped(torch.tensor([IDS])).logits[0]


def logits(target, adapter: int) -> torch.Tensor:
    cache, rows = target.new_cache(), TreeBatch.chains([IDS], torch.device("cpu"))
    return target.forward(rows, cache, cache.batch([cache.allocate(len(IDS))], [0], [adapter])).scores


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_family_are_those_of_peft(models, tmp_path, kind):
    folder, model = models(kind)
    expected, bare = random_adapter(folder, tmp_path, kind, target_modules=MODULES)
    target = model.target.with_lora(load_adapters({"x": tmp_path}, model.target).layers)
    assert (expected - bare).abs().max() > 0.1
    torch.testing.assert_close(logits(target, 0), expected, rtol=0, atol=1e-4)
    assert torch.equal(logits(target, -1), logits(model.target, -1))
    torch.testing.assert_close(logits(target, -1), bare, rtol=0, atol=1e-4)


def test_every_setting_means_what_it_means_to_peft(models, tmp_path):
    folder, model = models("llama")
    folders, expected = {}, {}
    for name, config in CASES.items():
        folders[name] = tmp_path / name
        expected[name], bare = random_adapter(folder, folders[name], "llama", **config)
        assert (expected[name] - bare).abs().max() > 1e-3, name
    target = model.target.with_lora(load_adapters(folders, model.target).layers)
    for number, name in enumerate(CASES):
        torch.testing.assert_close(logits(target, number), expected[name], rtol=0, atol=1e-4, msg=name)


def test_a_gguf_model_takes_the_adapter_of_its_folder(models, tmp_path):
    folder, model = models("llama")
    expected, _ = random_adapter(folder, tmp_path / "adapter", "llama", target_modules=MODULES)
    path = tmp_path / "model.gguf"
    write_gguf(path, model.config, load_file(folder / "model.safetensors"))  # its q and k are permuted
    target = load_model(path).target
    target = target.with_lora(load_adapters({"x": tmp_path / "adapter"}, target).layers)
    torch.testing.assert_close(logits(target, 0), expected, rtol=0, atol=1e-4)


def test_what_peft_wrote_needs_no_field_that_is_unknown_here(models, tmp_path):
    folder, model = models("llama")
    random_adapter(folder, tmp_path, "llama", target_modules=MODULES, lora_dropout=0.1, task_type="CAUSAL_LM")
    load_adapters({"x": tmp_path}, model.target)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "use_new_trick": True}))
    with pytest.raises(ValueError, match=r"adapters: x: .*'use_new_trick' is 'True', which is not supported"):
        load_adapters({"x": tmp_path}, model.target)
