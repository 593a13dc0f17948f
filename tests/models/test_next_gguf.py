"""GGUF files of Qwen3-Next: names, the order of heads, and that they give transformers' logits."""

from dataclasses import replace

import gguf
import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import open_checkpoint
from specengine.models.config_gguf import config_from_gguf
from specengine.models.transformer import load_transformer
from tests.engines import ids, tiny_model
from tests.models.hybrid_files import write_hybrid, write_next_gguf

CPU = torch.device("cpu")
# columns of every matrix fill blocks of 32
SIZES = {"linear_value_head_dim": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
IDS = torch.randint(320, (70,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("next")
    model = write_hybrid(folder, "qwen3_next", **SIZES, num_hidden_layers=4)
    return open_checkpoint(folder).config, model


def logits_of(checkpoint):
    target = load_transformer(checkpoint, "float32", CPU)
    cache = target.new_cache()
    return target.forward(TreeBatch.chains([IDS], CPU), cache, cache.batch([cache.allocate(len(IDS))], [0])).scores


def agrees(checkpoint, model):
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.1  # equal logits would prove nothing
    return (logits_of(checkpoint) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("joined", [False, True])
def test_a_file_gives_the_logits_of_transformers(written, tmp_path, joined):
    config, model = written
    checkpoint = open_checkpoint(write_next_gguf(tmp_path / "m.gguf", config, model.state_dict(), joined=joined))
    assert checkpoint.config == replace(
        config, rms_norm_eps=checkpoint.config.rms_norm_eps, intermediate_size=64, eos_token_ids=(), dtype=None
    )
    assert checkpoint.metadata["general.architecture"] == "qwen3next"
    assert agrees(checkpoint, model)
    checkpoint.config = replace(checkpoint.config, gated_delta=replace(checkpoint.config.gated_delta, tiled=True))
    assert not agrees(checkpoint, model)


def test_rows_of_b_and_a_in_another_order_would_be_noticed(written, tmp_path):
    config, model = written
    state = {
        name: torch.cat(value.chunk(2)[::-1]) if ".in_proj_ba." in name else value
        for name, value in model.state_dict().items()
    }
    assert not agrees(open_checkpoint(write_next_gguf(tmp_path / "m.gguf", config, state)), model)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_quantised_file_gives_the_logits_of_transformers_with_its_values(written, tmp_path, kind):
    config, model = written
    stored = gguf.GGMLQuantizationType[kind]
    path = write_next_gguf(tmp_path / "m.gguf", config, model.state_dict(), stored)
    state = {name: _dequantised(name, value, stored) for name, value in model.state_dict().items()}
    other = type(model)(model.config).eval()
    other.load_state_dict(state)
    checkpoint = open_checkpoint(path)
    assert agrees(checkpoint, other) and not agrees(checkpoint, model)
    for name, info in checkpoint.tensors.items():  # rows that are read one by one are those of the whole
        if info.dtype == kind and ".linear_attn." in name:
            blocks = checkpoint.read_blocks(name, 0, info.shape[0])
            rows = [checkpoint.read_blocks(name, row, row + 1) for row in range(info.shape[0])]
            assert torch.equal(torch.cat(rows), blocks)
            values = gguf.quants.dequantize(blocks.numpy(), stored)
            assert torch.equal(torch.from_numpy(values), checkpoint.read(name))


def _dequantised(name, value, kind):
    if value.ndim == 1 or name.endswith((".mlp.gate.weight", "shared_expert_gate.weight", "conv1d.weight")):
        return value
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), kind), kind))


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0], ids=["floats", "Q8_0"])
def test_drafts_change_no_token(written, tmp_path, kind):
    config, model = written
    path = write_next_gguf(tmp_path / "m.gguf", config, model.state_dict(), kind)
    target = load_transformer(open_checkpoint(path), "auto", CPU)
    prompt, params = [5, 6, 7] * 5, SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=1)
    plain, drafted = (
        Engine(replace(tiny_model("random:tiny-qwen3-next"), target=target), drafter=drafter).generate([prompt], params)
        for drafter in ("none", "prompt_lookup,min_ngram=1,adaptive=false")
    )
    assert ids(plain) == ids(drafted) and plain[0].logprobs == drafted[0].logprobs
    assert drafted[0].stats.acceptance_by_depth


def test_wrong_files_are_refused_by_name(written, tmp_path):
    config, model = written
    state = model.state_dict()
    name = "model.layers.0.linear_attn.in_proj_ba.weight"
    with pytest.raises(ValueError, match=r"in_proj_ba.weight' has shape .* expected 8 rows"):
        open_checkpoint(write_next_gguf(tmp_path / "m.gguf", config, {**state, name: state[name][:-1]}))
    metadata = open_checkpoint(write_next_gguf(tmp_path / "n.gguf", config, state)).metadata
    with pytest.raises(ValueError, match=r"'qwen3next.expert_count' is missing"):
        config_from_gguf({**metadata, "qwen3next.expert_count": 0}, {})
