"""Adapters that are no plain LoRA of attention and MLP matrices are refused by name, before anything runs."""

import json

import pytest
import torch
from safetensors.torch import save_file

from specengine.models.lora.folder import read_lora
from specengine.models.presets import PRESETS
from tests.adapters.files import lora_tensors, write_adapter

CONFIG = PRESETS["tiny-llama"]
Q = "base_model.model.model.layers.0.self_attn.q_proj"
FIELDS = {  # a field of adapter_config.json, and what the message says of it
    "peft_type": ("IA3", "'peft_type' is 'IA3', only LORA is supported"),
    "use_dora": (True, "'use_dora' is 'True', which is not supported"),
    "modules_to_save": (["lm_head"], "'modules_to_save' is "),
    "bias": ("lora_only", "'bias' is 'lora_only': adapters with biases are not supported"),
    "lora_bias": (True, "'lora_bias' is 'True', which is not supported"),
    "target_parameters": (["mlp.experts.gate_up_proj"], "'target_parameters' is "),
    "fan_in_fan_out": (True, "'fan_in_fan_out' is 'True', which is not supported"),
    "layer_replication": ([[0, 1]], "'layer_replication' is "),
    "trainable_token_indices": ([3], "'trainable_token_indices' is "),
    "init_lora_weights": (
        "pissa_niter_4",
        "'init_lora_weights' is 'pissa_niter_4': such an adapter belongs to changed",
    ),
    "r": (0, "'r' or 'rank_pattern' has 0, expected 1 to 512"),
    "rank_pattern": ({"q_proj": 1000}, "'r' or 'rank_pattern' has 1000"),
    "alpha_pattern": ({"q_proj": "2"}, "'lora_alpha' or 'alpha_pattern' has '2', expected a finite number"),
    "lora_alpha": ("8", "'lora_alpha' must be of type float"),
    "target_modules": (None, "'target_modules' is missing or empty"),
    "exclude_modules": (3, "'exclude_modules' must be a string or a list of strings"),
    "use_rslora": (1, "'use_rslora' must be of type bool"),
}


def write(folder, change=lambda tensors: None, **fields):
    write_adapter(folder, CONFIG, **fields)
    tensors = lora_tensors(CONFIG)
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_settings_that_change_the_arithmetic_are_refused(tmp_path):
    read_lora(write(tmp_path), CONFIG)
    for field, (value, message) in FIELDS.items():
        with pytest.raises(ValueError) as error:
            read_lora(write(tmp_path, **{field: value}), CONFIG)
        assert message in str(error.value) and str(tmp_path) in str(error.value), field
    with pytest.raises(ValueError, match=r"one of its regexes cannot be read"):
        read_lora(write(tmp_path, target_modules="(q_proj"), CONFIG)


def test_modules_that_are_no_matrices_of_a_layer_are_refused(tmp_path):
    for modules in (["q_proj", "lm_head"], ["embed_tokens"], r".*(q_proj|lm_head)"):
        with pytest.raises(ValueError, match=r"it adapts (lm_head|model.embed_tokens); supported are q_proj, "):
            read_lora(write(tmp_path, target_modules=modules), CONFIG)
    with pytest.raises(ValueError, match=r"its target_modules name no matrix of this model"):
        read_lora(write(tmp_path, target_modules=["query"]), CONFIG)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(f"{Q}.lora_A.weight"), rf"tensor '{Q}.lora_A.weight' is missing \(1 missing in all\)"),
        (lambda t: t.update({f"{Q}.bias": torch.ones(2)}), f"tensor '{Q}.bias' has no place in this model"),
        (
            lambda t: t.update({Q.replace(".0.", ".9.") + ".lora_A.weight": torch.ones(4, 64)}),
            "tensor '.*layers.9.self_attn.q_proj.lora_A.weight' has no place in this model",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}),
            "it adapts lm_head",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(5, CONFIG.hidden_size)}),
            rf"tensor '{Q}.lora_A.weight' has shape \(5, \d+\), expected \(4, \d+\)",
        ),
        (lambda t: t[f"{Q}.lora_B.weight"].fill_(float("nan")), f"'{Q}.lora_B.weight' has values that are not finite"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, CONFIG.hidden_size, dtype=torch.int32)}),
            f"'{Q}.lora_A.weight' has type int32, expected float32, float16, bfloat16",
        ),
    ],
    ids=["missing", "without place", "of no layer", "of the head", "mis-shaped", "not finite", "integers"],
)
def test_faulty_tensors_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_lora(write(tmp_path, change), CONFIG)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json does not exist"):
        read_lora(tmp_path, CONFIG)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds neither adapter_model.safetensors nor adapter_model.bin"):
        read_lora(tmp_path, CONFIG)


def test_a_torch_file_is_read_without_running_code(tmp_path):
    write(tmp_path)
    safe = read_lora(tmp_path, CONFIG)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(lora_tensors(CONFIG), tmp_path / "adapter_model.bin")
    read = read_lora(tmp_path, CONFIG)
    assert read.keys() == safe.keys()
    assert all(torch.equal(read[name].a, safe[name].a) and torch.equal(read[name].b, safe[name].b) for name in safe)


def test_a_config_without_names_takes_the_defaults_of_peft(tmp_path):
    write(tmp_path, rank_pattern={})
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    del about["r"], about["lora_alpha"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"has shape \(4, \d+\), expected \(8, "):
        read_lora(tmp_path, CONFIG)
