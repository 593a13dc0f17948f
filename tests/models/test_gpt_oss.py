"""gpt-oss against transformers' own, its layouts of experts, and fields that cannot be honoured."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import open_checkpoint
from specengine.models.config import MoeConfig, RopeConfig
from specengine.models.config_hf import config_from_hf
from specengine.models.transformer import load_transformer
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import LoadedModel, load_model
from tests.backends import cpu_kernels
from tests.engines import ids

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "rope_parameters": dict(YARN),  # transformers writes its base into it
    "initializer_range": 0.15,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns transformers' model and the folder it saved."""
    torch.manual_seed(3)
    config = transformers.GptOssConfig(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # fresh biases are zeros, and such sinks hardly count
                parameter.normal_(0, 2.0 if name.endswith("sinks") else 0.5)
    folder = tmp_path_factory.mktemp("gpt_oss")
    model.save_pretrained(folder)
    return model, folder


def logits_of(target, prompt):
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(prompt))], [0])
    return target.forward(TreeBatch.chains([prompt], target.device), cache, batch).scores.cpu()


def prompt_of(size, seed=1):
    return torch.randint(0, 320, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_and_greedy_tokens_are_those_of_transformers(saved):
    model, folder = saved
    loaded = load_model(folder, device="cpu", dtype="float32")
    assert loaded.target.config.sliding_layers == (True, False, True, False)
    prompt = prompt_of(100)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
        text = model.generate(torch.tensor([prompt[:20]]), max_new_tokens=64, do_sample=False, eos_token_id=None)
    assert (logits_of(loaded.target, prompt) - expected).abs().max() < 1e-4 * expected.abs().max()
    for drafter in ("none", "prompt_lookup,adaptive=false,min_ngram=1"):
        engine = Engine(loaded, drafter=drafter)
        output = engine.generate(prompt[:20], SamplingParams(max_new_tokens=64, ignore_eos=True))
        assert output.token_ids == text[0, 20:].tolist()


@pytest.mark.parametrize(
    "part", ["sinks", "mlp.experts.gate_up_proj_bias", "down_proj_bias", "router.bias", "o_proj.bias"]
)
def test_every_tensor_counts(saved, tmp_path, part):
    _, folder = saved
    state = {
        name: value * (0 if name.endswith(part) else 1)
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    whole, less = (
        logits_of(load_transformer(open_checkpoint(path), "float32", CPU), prompt_of(40)) for path in (folder, tmp_path)
    )
    assert (whole - less).abs().max() > 0.01 * whole.std()


def packed(state, folder, config):
    """Writes experts of random MXFP4 codes to a folder; returns the same model's tensors as floats."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    generator, codes, floats = torch.Generator().manual_seed(5), {}, {}
    for name, value in state.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes[name] = floats[name] = value
            continue
        experts, columns, rows = value.shape
        code = torch.randint(0, 16, (experts, rows, columns), generator=generator)
        exponents = torch.randint(119, 124, (experts, rows, columns // 32), generator=generator)
        low, high = code[..., ::2], code[..., 1::2]
        codes[f"{name}_blocks"] = (low | high << 4).to(torch.uint8).view(experts, rows, columns // 32, 16)
        codes[f"{name}_scales"] = exponents.to(torch.uint8)
        scales = (exponents - 127.0).exp2().repeat_interleave(32, dim=2)
        floats[name] = (numbers[code] * scales).transpose(1, 2).contiguous()
    folder.mkdir()
    save_file(codes, folder / "model.safetensors")
    config = {**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config))
    return codes, floats


@pytest.fixture
def mxfp4(saved, tmp_path):
    """Returns a folder of MXFP4 experts and one of the same values as floats."""
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    codes, floats = packed(load_file(folder / "model.safetensors"), tmp_path / "codes", config)
    (tmp_path / "floats").mkdir()
    save_file(floats, tmp_path / "floats" / "model.safetensors")
    (tmp_path / "floats" / "config.json").write_text(json.dumps(config))
    convert = transformers.integrations.mxfp4.convert_moe_packed_tensors
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(convert(codes[f"{name}_blocks"], codes[f"{name}_scales"], dtype=torch.float32), floats[name])
    return tmp_path / "codes", tmp_path / "floats"


def test_mxfp4_experts_have_the_values_of_their_codes_and_keep_them(mxfp4):
    codes, floats = map(open_checkpoint, mxfp4)
    assert set(codes.tensors) == set(floats.tensors)
    for name in codes.tensors:
        assert torch.equal(codes.read(name), floats.read(name)), name
    part = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert torch.equal(codes.read_rows(part, 5, 40), floats.read(part)[5:40])
    prompt = prompt_of(60)
    expected = logits_of(load_transformer(floats, "float32", CPU), prompt)
    assert torch.equal(logits_of(load_transformer(codes, "float32", CPU), prompt), expected)
    for dtype in ("auto", "auto-float32"):
        kept = load_transformer(codes, dtype, CPU)
        experts = kept.weights.layers[1].moe
        assert {weight.format for weight in (*experts.gate_up.weights, *experts.down.weights)} == {"table4_32"}
        error = (logits_of(kept, prompt) - expected).abs().median()
        assert error < (0.02 if dtype == "auto" else 1e-5) * expected.std()
        model = LoadedModel("codes", dtype, kept, None, frozenset())
        texts = [
            ids(Engine(model, drafter=drafter).generate([prompt, prompt[:7]], SamplingParams(max_new_tokens=24)))
            for drafter in ("none", "prompt_lookup,adaptive=false,min_ngram=1")
        ]
        assert texts[0] == texts[1]


def test_mxfp4_experts_keep_their_codes_on_a_device(cuda_backend, mxfp4):
    codes, floats = map(open_checkpoint, mxfp4)
    kept = load_transformer(codes, "auto", cuda_backend.device, cuda_ops(cuda_backend.device, strict=True))
    experts = kept.weights.layers[1].moe
    assert {weight.format for weight in (*experts.gate_up.weights, *experts.down.weights)} == {"e2m1_32"}
    prompt = [*prompt_of(20), *prompt_of(4)]
    found = logits_of(kept, prompt)
    with cpu_kernels():
        expected = logits_of(load_transformer(floats, "float32", CPU), prompt)
    assert (found - expected).abs().median() < 0.02 * expected.std()
    model, params = LoadedModel("codes", "auto", kept, None, frozenset()), SamplingParams(max_new_tokens=3, logprobs=2)
    plain, drafted = (
        Engine(model, drafter=drafter).generate(prompt, params)
        for drafter in ("none", "prompt_lookup,adaptive=false,min_ngram=1,nodes=4")
    )
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "down_proj_scales",
            None,
            "has type uint8, expected uint8 beside 'model.layers.0.mlp.experts.down_proj_scales'",
        ),
        ("down_proj_scales", lambda x: x[..., :2].contiguous(), r"has shape \(6, 64, 2\), expected \(6, 64, 3\)"),
        ("down_proj_scales", lambda x: torch.full_like(x, 255), "has a scale of 255, which stands for no number"),
        ("gate_up_proj_blocks", lambda x: x.to(torch.int32), "has type int32, expected uint8 beside"),
        ("gate_up_proj_bias", lambda x: x[:, 1:].contiguous(), r"has shape \(6, 191\), expected \(6, 192\)"),
    ],
)
def test_damaged_experts_are_named(mxfp4, name, change, message):
    path = mxfp4[0] / "model.safetensors"
    state, full = load_file(path), f"model.layers.0.mlp.experts.{name}"
    value = state.pop(full)
    if change is not None:
        state[full] = change(value)
    save_file(state, path)
    with pytest.raises(ValueError, match=message):
        load_transformer(open_checkpoint(mxfp4[0]), "float32", CPU)


def test_a_configuration_has_the_defaults_of_transformers():
    default = transformers.GptOssConfig()
    config = config_from_hf({**default.to_dict(), "architectures": ["GptOssForCausalLM"]})
    assert config.rope == RopeConfig(150000.0, "yarn", 32.0, 4096, truncate=False)
    assert config.moe == MoeConfig(
        128, 4, 2880, router_bias=True, expert_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702
    )
    assert config.qkv_bias and config.output_bias and config.attention_sinks and config.sliding_window == 128
    assert config.sliding_layers == (True, False) * 18
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = {
        name: getattr(default, name)
        for name in (*needed, "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    }
    assert config_from_hf({"model_type": "gpt_oss", **fields}) == replace(config, dtype=None)
    older = {"rope_theta": 1e4, "rope_scaling": {**YARN, "beta_fast": 16.0}}
    assert config_from_hf({"model_type": "gpt_oss", **fields, **older}).rope == RopeConfig(
        1e4, "yarn", 4.0, 64, beta_fast=16.0, truncate=False
    )
    for changes, message in (
        ({"swiglu_limit": 0.0}, "'swiglu_limit' must be positive"),
        ({"swiglu_alpha": "x"}, "'swiglu_alpha' must be of type float"),
        ({"num_experts_per_tok": 40}, "num_experts_per_tok must be from 1 to 32"),
        ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu'"),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 36}, "no sliding_window is in use"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_hf({"model_type": "gpt_oss", **fields, **changes})
