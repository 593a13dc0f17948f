"""The transformer against transformers' own, on small seeded models of every family."""

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models.config_hf import config_from_hf
from specengine.tensor_parallel.loading import load_model

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FEW = {"intermediate_size": 40, "num_local_experts": 9, "num_experts_per_tok": 3}
EXPERTS = {"moe_intermediate_size": 40, "num_experts": 9, "num_experts_per_tok": 3}  # no whole panels of 16
GPT_OSS = {
    "intermediate_size": 40,
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "swiglu_limit": 1.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

SLIDING = {"use_sliding_window": True, "sliding_window": 8}

VARIANTS = {
    "llama": ("LlamaConfig", {}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-gqa-3": ("LlamaConfig", {"num_attention_heads": 6, "hidden_size": 96}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim-80": ("LlamaConfig", {"head_dim": 80}),
    "llama-odd-vocabulary": ("LlamaConfig", {"vocab_size": 333}),
    "llama3-rope": ("LlamaConfig", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}),
    "linear-rope": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "dynamic-rope": ("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "yarn-rope": ("LlamaConfig", {"rope_scaling": YARN}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"intermediate_size": 72, "num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", FEW),
    "olmoe-renormalised": ("OlmoeConfig", {**FEW, "norm_topk_prob": True, "attention_bias": True}),
    "granite": ("GraniteConfig", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite-moe": ("GraniteMoeConfig", {**GRANITE, **FEW}),
    "granite-moe-tied": ("GraniteMoeConfig", {**GRANITE, **FEW, "tie_word_embeddings": True}),
    "granite-moe-shared": ("GraniteMoeSharedConfig", {**GRANITE, **FEW, "shared_intermediate_size": 56}),
    "qwen2-moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0]}),
    "qwen3-moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2-moe-sliding": ("Qwen2MoeConfig", {**EXPERTS, **SLIDING, "max_window_layers": 2}),
    "qwen3-moe-sliding": ("Qwen3MoeConfig", {**EXPERTS, **SLIDING, "max_window_layers": 2}),
    "gpt-oss": ("GptOssConfig", {**GPT_OSS, "sliding_window": 16, "rope_parameters": {**YARN, "truncate": False}}),
    "qwen3-moe-every-second": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 32, "decoder_sparse_step": 2}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """Returns transformers' model and the folder it saved."""
    name, changes = VARIANTS[request.param]
    torch.manual_seed(7)
    config = getattr(transformers, name)(**{**COMMON, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # fresh models have zero biases and unit norms
            if parameter.ndim == 1 or parameter_name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1 * ("bias" in parameter_name or 1.0))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def our_logits(folder, ids):
    loaded = load_model(folder, device="cpu", dtype="float32")
    cache = loaded.target.new_cache()
    batch = cache.batch([cache.allocate(len(ids))], [0])
    return loaded.target.forward(TreeBatch.chains([ids], loaded.target.device), cache, batch).scores


def test_logits_are_those_of_transformers(pair):
    model, folder = pair
    ids = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    error = (our_logits(folder, ids) - expected).abs().max() / expected.abs().max()
    assert error < 1e-4
    assert expected.std() > 0.1  # equal logits would prove nothing


def test_defaults_of_mixtures_are_those_of_transformers():
    for name in ("MixtralConfig", "Qwen2MoeConfig", "Qwen3MoeConfig", "GptOssConfig"):
        theirs = getattr(transformers, name)(use_sliding_window=True, sliding_window=8, num_hidden_layers=6)
        told = {"architectures": [name.replace("Config", "ForCausalLM")], "num_hidden_layers": 6, "sliding_window": 8}
        told |= {"use_sliding_window": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "vocab_size": 320}
        told |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        ours = config_from_hf(told)  # without layer_types, as files of transformers 4 are
        types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 6
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"], name
        assert [ours.layer_window(layer) == 8 for layer in range(6)] == [each == "sliding_attention" for each in types]


def test_greedy_tokens_are_those_of_transformers(pair):
    model, folder = pair
    prompt = torch.randint(0, 320, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    output = Engine(folder, drafter="prompt_lookup,min_ngram=1", device="cpu", dtype="float32").generate(
        prompt, SamplingParams(max_new_tokens=64, ignore_eos=True)
    )
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert output.token_ids == logits.argmax(-1).tolist()


def peak_of_loading(path, dtype: str) -> int:
    """Measures the peak of resident memory in a process of its own, in bytes, with mapped pages."""
    import subprocess
    import sys

    script = """
import sys
import specengine.models.checkpoint_gguf  # memory that the libraries take on first use is not counted
from specengine.tensor_parallel.loading import load_model
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
load_model("random:tiny-llama", device="cpu")
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # resets the high-water mark
loaded = load_model(sys.argv[1], device="cpu", dtype=sys.argv[2])
print(status("VmHWM") - before)
"""
    result = subprocess.run([sys.executable, "-c", script, path, dtype], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.full
def test_peak_memory_of_loading_stays_near_the_loaded_size(tmp_path):
    config = transformers.LlamaConfig(
        **{**COMMON, "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    size = sum(p.numel() for p in model.parameters()) * 4
    model.save_pretrained(tmp_path, max_shard_size="200MB")
    del model
    assert peak_of_loading(tmp_path, "float32") < 1.15 * size


@pytest.mark.full
@pytest.mark.model
def test_peak_memory_of_loading_a_quantised_file_stays_near_its_size(smollm2_path):
    assert peak_of_loading(smollm2_path, "auto") < 1.6 * smollm2_path.stat().st_size
