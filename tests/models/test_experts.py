"""Mixtures of experts: the layouts of their files, what is refused, and drafts that change no token and no bit."""

from dataclasses import replace

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models import weights
from specengine.models.checkpoint import RandomCheckpoint, open_checkpoint
from specengine.models.config import MoeConfig
from specengine.models.config_hf import config_from_hf
from specengine.models.experts.tensors import ExpertTensors
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.models.weights import WeightLoader
from specengine.ops import native
from specengine.tensor_parallel.loading import LoadedModel, load_model
from specengine.utils.multipliers import PLAIN, Multipliers
from tests.adapters.files import write_adapter
from tests.engines import Oracle, ids
from tests.models.files import random_state
from tests.models.moe_files import FusedExperts, write_moe_gguf

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
PROMPTS = [[5, 9, 17, 5, 9, 4], [33, 2, 7, 7, 7, 250, 8], [1]]
FAMILIES = ("tiny-mixtral", "tiny-qwen2-moe", "tiny-qwen3-moe", "tiny-olmoe", "tiny-granite-moe")
ALL_FAMILIES = (*FAMILIES, "tiny-gpt-oss")  # see test_gpt_oss.py for its GGUF files


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("preset", ALL_FAMILIES)
def test_drafts_change_no_token_and_no_bit_of_a_logit(preset, dtype):
    target = load_transformer(RandomCheckpoint(PRESETS[preset]), dtype, CPU)
    model = LoadedModel("experts", dtype, target, None, frozenset())
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=3, logprobs=2)
        plain = Engine(model, drafter="none", max_batch_size=1).generate(PROMPTS, params)
        answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
        oracles = [Oracle(answers, 320, nodes=nodes) for nodes in (1, 5, 63)]
        for drafter in ("prompt_lookup,adaptive=false", "lookahead,adaptive=false", *oracles):
            drafted = Engine(model, drafter=drafter, max_batch_size=4).generate(PROMPTS, params)
            assert ids(drafted) == ids(plain), drafter
            assert [output.logprobs for output in drafted] == [output.logprobs for output in plain], drafter


def test_experts_of_one_tensor_are_those_of_many(tmp_path):
    config = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, moe_intermediate_size=40, num_experts=6, head_dim=16,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "many")
    (tmp_path / "one").mkdir()
    state = load_file(tmp_path / "many" / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([state.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(6)])
            for part in ("gate", "up", "down")
        }
        state[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        state[f"{prefix}.down_proj"] = parts["down"]
    save_file(state, tmp_path / "one" / "model.safetensors")
    (tmp_path / "one" / "config.json").write_text((tmp_path / "many" / "config.json").read_text())
    many, one = open_checkpoint(tmp_path / "many"), open_checkpoint(tmp_path / "one")
    assert set(many.tensors) == set(one.tensors)
    for name in many.tensors:
        assert torch.equal(many.read(name), one.read(name)), name
    state["model.layers.1.mlp.experts.down_proj"] = torch.zeros(6, 64, 39)
    save_file(state, tmp_path / "one" / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.experts.down_proj' has shape .*expected \(6, 64, 40\)"):
        open_checkpoint(tmp_path / "one")


@pytest.mark.parametrize("preset", ["tiny-qwen2-moe", "tiny-qwen3-moe"])
def test_every_byte_of_experts_in_one_tensor_is_read_once(monkeypatch, preset):
    monkeypatch.setattr(weights, "_STEP_BYTES", 4096)  # several steps a matrix
    stored = FusedExperts(PRESETS[preset], random_state(PRESETS[preset]))
    fused = WeightLoader(ExpertTensors(stored), "float32", CPU, native).model()
    assert stored.bytes_read == sum(tensor.nbytes for tensor in stored.state.values())
    plain = WeightLoader(RandomCheckpoint(PRESETS[preset]), "float32", CPU, native).model()
    for own, other in zip(fused.layers, plain.layers, strict=True):
        for part in ("gate_up", "down") if own.moe else ():
            pairs = zip(getattr(own.moe, part).weights, getattr(other.moe, part).weights, strict=True)
            assert all(torch.equal(one.data, two.data) for one, two in pairs)


def logits_of(target, prompt):
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(prompt))], [0])
    return target.forward(TreeBatch.chains([prompt], CPU), cache, batch).scores


@pytest.mark.parametrize("preset", FAMILIES)
def test_gguf_files_have_the_tensors_of_their_model(tmp_path, preset):
    preset = PRESETS[preset]  # these architectures have no dense layers in GGUF files
    config = replace(preset, rms_norm_eps=2**-16, moe=replace(preset.moe, dense_layers=frozenset()))
    if config.multipliers != PLAIN:
        config = replace(config, multipliers=Multipliers(12.0, 0.109375, 0.21875, 6.0))  # exact in float32
    state = random_state(config)
    checkpoint = open_checkpoint(write_moe_gguf(tmp_path / "m.gguf", config, state))
    assert checkpoint.config == replace(config, dtype=None)
    assert set(checkpoint.tensors) == set(state)
    for name, tensor in state.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    middle = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert torch.equal(checkpoint.read_rows(middle, 3, 11), state[middle][3:11])


def test_a_shared_expert_of_granite_has_no_gate(tmp_path):
    config = replace(PRESETS["tiny-granite-moe"], moe=MoeConfig(6, 2, 40, shared_size=48))
    state = random_state(config)
    checkpoint = open_checkpoint(write_moe_gguf(tmp_path / "m.gguf", config, state))
    assert checkpoint.config.moe == config.moe
    assert set(checkpoint.tensors) == set(state)
    for name in (name for name in state if "shared_expert" in name):
        assert torch.equal(checkpoint.read(name), state[name]), name


@pytest.mark.parametrize(("kind", "form"), [("Q8_0", "q8"), ("Q4_0", "q4"), ("Q5_0", "q8")])
def test_gguf_experts_keep_their_blocks(tmp_path, kind, form):
    config = replace(PRESETS["tiny-qwen3-moe"], hidden_size=128, moe=MoeConfig(6, 2, 64))
    state = random_state(config)
    checkpoint = open_checkpoint(write_moe_gguf(tmp_path / "m.gguf", config, state, kind))
    raw = gguf.GGMLQuantizationType[kind]
    for name in (name for name in state if ".experts." in name):
        expected = gguf.quants.dequantize(gguf.quants.quantize(state[name].numpy(), raw), raw)
        assert torch.equal(checkpoint.read(name), torch.from_numpy(expected)), name
    kept, floats = (load_transformer(checkpoint, dtype, CPU) for dtype in ("auto", "float32"))
    experts = kept.weights.layers[1].moe
    assert {weight.format for weight in (*experts.gate_up.weights, *experts.down.weights)} == {form}
    expected, found = (logits_of(target, list(range(40))) for target in (floats, kept))
    assert (found - expected).abs().median() < 0.02 * expected.std()  # int8 rows may send one to another expert


def test_fields_that_cannot_be_honoured_are_named():
    base = {
        **transformers.Qwen3MoeConfig(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2
        ).to_dict(),
        "architectures": ["Qwen3MoeForCausalLM"],
        "max_position_embeddings": 64,
        "vocab_size": 99,
    }
    assert config_from_hf(base).moe == MoeConfig(128, 8, 768, renormalise=False)
    for changes, match in (
        ({"num_experts_per_tok": 200}, "num_experts_per_tok must be from 1 to 32"),
        ({"num_experts": 0, "num_local_experts": 0}, "num_experts must be from 1 to 1024"),
        ({"moe_intermediate_size": -1}, "the experts' intermediate size must be positive"),
        ({"mlp_only_layers": [2]}, "'mlp_only_layers' must list layers from 0 to 1"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be positive"),
        ({"architectures": ["LlamaForCausalLM"]}, "which llama does not have"),
    ):
        with pytest.raises(ValueError, match=match):
            config_from_hf({**base, **changes})


def test_a_window_that_mixtral_does_not_name_is_that_of_transformers():
    values = transformers.MixtralConfig(num_hidden_layers=2).to_dict() | {"architectures": ["MixtralForCausalLM"]}
    whole, silent = (dict(values), {name: value for name, value in values.items() if name != "sliding_window"})
    assert config_from_hf(silent) == config_from_hf(whole)
    assert config_from_hf({**silent, "sliding_window": 64}).sliding_layers == (True, True)


def test_what_experts_cannot_do_yet_is_refused_by_name():
    for name, what in (("olmoe", "norms read all heads"), ("granite-moe", "multipliers are not supported")):
        with pytest.raises(ValueError, match=f"^tensor_parallel: expected 1 for .*{what}"):
            load_model(f"random:tiny-{name}", device="cpu", tensor_parallel=2)
    with pytest.raises(ValueError, match=r"^tensor_parallel: 16 processes cannot share 2 key/value heads, 48 interm"):
        load_model("random:tiny-qwen2-moe", device="cpu", tensor_parallel=16)


def test_adapters_of_attention_serve_a_mixture_and_those_of_experts_are_refused(tmp_path):
    config = PRESETS["tiny-qwen2-moe"]
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    folders = {"a": write_adapter(tmp_path / "a", config, modules=attention, size=2.0)}
    params = SamplingParams(max_new_tokens=12, adapter="a")
    texts = [
        ids(Engine("random:tiny-qwen2-moe", device="cpu", adapters=folders, drafter=drafter).generate(PROMPTS, each))
        for drafter in ("none", "lookahead,adaptive=false")
        for each in (params, replace(params, adapter=None))
    ]
    assert texts[0] == texts[2] != texts[1] == texts[3]
    for name, modules in (("b", ("q_proj", "down_proj")), ("c", ("shared_expert.up_proj", "q_proj"))):
        folder = write_adapter(tmp_path / name, config, modules=modules)
        with pytest.raises(ValueError, match=r"expert.*has no place in this model"):
            Engine("random:tiny-qwen2-moe", device="cpu", adapters={"x": folder})


def test_a_pass_counts_the_experts_that_its_layers_read():
    target = load_transformer(RandomCheckpoint(PRESETS["tiny-qwen3-moe"]), "float32", CPU)
    cache = target.new_cache()
    for rows in (1, 5, 40):
        batch = cache.batch([cache.allocate(rows)], [0])
        states = target.hidden_states(TreeBatch.chains([list(range(rows))], CPU), cache, batch)
        counts = states.experts.tolist()
        assert counts[0] == 0 and all(4 <= count <= min(16, 4 * rows) for count in counts[1:])
        assert (counts == [0, 4, 4]) == (rows == 1)
        assert states.experts_per_layer == states.rows([0]).experts_per_layer == sum(counts) / 2  # the first is dense


def test_an_expert_in_two_forms_is_refused(tmp_path):
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_local_experts=2, num_experts_per_tok=1,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    twice = {"model.layers.0.mlp.experts.down_proj": torch.ones(2, 32, 24)}
    twice["model.layers.0.block_sparse_moe.experts.1.w2.weight"] = torch.ones(32, 24)
    save_file(tensors | twice, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"and another one both have 'model.layers.0.mlp.experts.0.down_proj.weight'"):
        open_checkpoint(tmp_path)
