"""What models, places and values `specengine quantize` takes, and how it refuses others."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from specengine.cli.main import app
from specengine.models.checkpoint import open_checkpoint
from specengine.models.config import RopeConfig
from specengine.models.presets import PRESETS
from specengine.models.rope import rope_tables
from specengine.quantise.hf_config import config_json
from specengine.quantise.int4_groups import group_of, quantise_rows
from specengine.quantise.quantise import quantise
from specengine.quantise.source import is_linear
from tests.models.files import random_state
from tests.models.gguf_files import write_gguf
from tests.tokenizer.vocabularies import json_backend, write_folder

TINY = replace(PRESETS["tiny-llama"], num_layers=1, rms_norm_eps=2**-16)


def folder_of(folder, config, state=None):
    """A folder without a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(config, "test")))
    save_file(state or random_state(config), folder / "model.safetensors")
    return folder


ROPES = {
    "llama3": RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192),
    "linear": RopeConfig(kind="linear", factor=2.0),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_max_position=128, beta_fast=16.0),
    "yarn, attention_factor": RopeConfig(kind="yarn", factor=4.0, original_max_position=128, attention_factor=2.0),
    "yarn, attn_factor": RopeConfig(
        kind="yarn", factor=4.0, original_max_position=128, attn_factor=0.5, extrapolation_factor=0.5
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_settings_survive_the_way_to_gguf_and_back(tmp_path, kind):
    config = replace(TINY, rope=ROPES[kind], max_position=16384)
    quantise(folder_of(tmp_path / "hf", config), "q8_0", tmp_path / "m.gguf")
    quantise(tmp_path / "m.gguf", "fp8-block", tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["rope_scaling"]["rope_type"] == ROPES[kind].kind
    plain, expected = (rope_tables(replace(config, rope=rope), 64) for rope in (RopeConfig(), config.rope))
    written = rope_tables(open_checkpoint(tmp_path / "m.gguf").config, 64)
    for ours, theirs, other in zip(written, expected, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert (ours - other).abs().max() > 0.1


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        (RopeConfig(kind="dynamic", factor=2.0), "dynamic"),
        (RopeConfig(kind="yarn", factor=4.0, original_max_position=128, truncate=False), "truncate=False"),
    ],
)
def test_rotary_settings_that_gguf_cannot_say_are_refused(tmp_path, rope, named):
    source = folder_of(tmp_path / "hf", replace(TINY, rope=rope))
    with pytest.raises(ValueError, match=named):
        quantise(source, "q8_0", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("to", ["q4_1", "int4-g128"])
def test_a_tied_head_biases_and_norms_of_queries_survive(tmp_path, to):
    biased = replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True, tie_embeddings=True)
    normed = replace(PRESETS["tiny-qwen3"], num_layers=1, tie_embeddings=True)
    for number, config in enumerate((biased, normed)):
        source, out = folder_of(tmp_path / f"hf{number}", config), tmp_path / f"out{number}"
        out = out.with_suffix(".gguf") if to == "q4_1" else out
        quantise(source, to, out)
        state = random_state(config)
        assert "lm_head.weight" not in state
        if to == "q4_1":
            checkpoint = open_checkpoint(out)
            assert checkpoint.config.tie_embeddings and set(checkpoint.tensors) == set(state)
            vectors = [name for name in state if state[name].ndim == 1]
            assert len(vectors) > (7 if config is biased else 3)
            for name in vectors:
                assert torch.equal(checkpoint.read(name), state[name]), name


def test_a_window_of_every_layer_survives_and_one_of_some_layers_is_refused(tmp_path):
    config = replace(TINY, architecture="mistral", sliding_window=16, sliding_layers=(True,))
    quantise(folder_of(tmp_path / "hf", config), "q8_0", tmp_path / "m.gguf")
    written = open_checkpoint(tmp_path / "m.gguf").config
    assert written.architecture == "llama" and written.sliding_window == config.sliding_window
    quantise(tmp_path / "m.gguf", "fp8-block", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mistral"
    values = config_json(replace(PRESETS["tiny-qwen2"], rms_norm_eps=2**-16), "test")
    values |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "config.json").write_text(json.dumps(values))
    save_file(random_state(PRESETS["tiny-qwen2"]), tmp_path / "some" / "model.safetensors")
    with pytest.raises(ValueError, match="sliding"):
        quantise(tmp_path / "some", "q8_0", tmp_path / "some.gguf")


def test_random_weights_need_no_tokenizer(tmp_path):
    quantise("random:tiny-llama", "q8_0", tmp_path / "m.gguf")
    assert open_checkpoint(tmp_path / "m.gguf").config.num_layers == PRESETS["tiny-llama"].num_layers
    quantise("random:tiny-llama", "fp8-block", tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_folder_whose_tokenizer_gguf_cannot_hold_is_refused(tmp_path):
    backend = json_backend()
    backend.add_special_tokens([f"<{index}>" for index in range(100)])
    source = write_folder(tmp_path / "hf", backend, config__json=config_json(TINY, "test"))
    save_file(random_state(TINY), source / "model.safetensors")
    with pytest.raises(ValueError, match=r"tokenizer\.json: has 360 entries, but the embedding has 320 rows"):
        quantise(source, "q8_0", tmp_path / "m.gguf")
    quantise(source, "fp8-block", tmp_path / "out")  # a folder just takes the file over


@pytest.mark.parametrize("to", ["q4_1", "int4-g128"])
def test_columns_that_have_no_groups_are_named(tmp_path, to):
    config = replace(TINY, intermediate_size=80)
    with pytest.raises(ValueError, match=r"down_proj\.weight' has 80 columns.*multiple of 32"):
        quantise(folder_of(tmp_path / "hf", config), to, tmp_path / ("m.gguf" if to == "q4_1" else "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("to", ["q8_0", "int4-g128", "fp8-block"])
def test_a_value_that_is_not_finite_is_named_and_leaves_nothing(tmp_path, to):
    state = random_state(TINY)
    state["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"up_proj\.weight' has a value that is not finite"):
        quantise(folder_of(tmp_path / "hf", TINY, state), to, tmp_path / ("m.gguf" if to == "q8_0" else "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("to", ["q8_0", "q4_1"])
def test_a_value_that_float16_scales_do_not_hold_is_named_and_leaves_nothing(tmp_path, to):
    state = random_state(TINY)
    state["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e8
    with pytest.raises(
        ValueError, match=rf"up_proj\.weight' has values too large for the float16 scales of {to.upper()}"
    ):
        quantise(folder_of(tmp_path / "hf", TINY, state), to, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_older_name_of_a_configuration_is_not_left_in_what_is_written(tmp_path):
    quantise(folder_of(tmp_path / "hf", TINY), "fp8-block", tmp_path / "first")
    path = tmp_path / "first" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "compression_config": values.pop("quantization_config")}))
    quantise(tmp_path / "first", "int4-g128", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        "compression_config" not in written and written["quantization_config"]["quant_method"] == "compressed-tensors"
    )


def refused(*arguments):
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_the_command_writes_a_file_and_refuses_wrong_places(tmp_path):
    source, out = folder_of(tmp_path / "hf", TINY), tmp_path / "m.gguf"
    result = CliRunner().invoke(app, ["quantize", str(source), "--to", "q8_0", "--out", str(out)])
    assert result.exit_code == 0 and "12 tensors" in result.output
    first = out.read_bytes()
    assert "exists; --overwrite" in refused(source, "--to", "q4_1", "--out", out)
    assert out.read_bytes() == first
    assert (
        CliRunner().invoke(app, ["quantize", str(source), "--to", "q4_1", "--out", str(out), "--overwrite"]).exit_code
        == 0
    )
    assert out.stat().st_size < len(first)
    assert "expected one of q4_1, q8_0, int4-g128, fp8-block" in refused(source, "--to", "q5_0", "--out", out)
    assert "a file ending in .gguf" in refused(source, "--to", "q8_0", "--out", tmp_path / "folder")
    assert "a folder" in refused(source, "--to", "fp8-block", "--out", tmp_path / "n.gguf")
    assert "no such folder" in refused(tmp_path / "missing", "--to", "q8_0", "--out", tmp_path / "n.gguf")


def test_a_model_or_a_stranger_is_never_overwritten(tmp_path):
    source = folder_of(tmp_path / "hf", TINY)
    gguf_source = write_gguf(tmp_path / "s.gguf", TINY, random_state(TINY))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_text("picture")
    wrong = ((source, "fp8-block", source), (source, "fp8-block", tmp_path), (gguf_source, "q8_0", gguf_source))
    for model, to, out in (*wrong, (source, "fp8-block", tmp_path / "photos")):
        with pytest.raises(ValueError, match=f"out: .*{out.name}"):
            quantise(model, to, out, overwrite=True)
    assert (tmp_path / "photos" / "one.png").exists() and open_checkpoint(source) and open_checkpoint(gguf_source)
    quantise(source, "fp8-block", tmp_path / "out")
    (tmp_path / "out" / "old.txt").write_text("of the former model")
    quantise(source, "int4-g128", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "old.txt").exists()
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in random_state(TINY).items()}
    with pytest.raises(ValueError, match="not finite"):
        quantise(folder_of(tmp_path / "nan", TINY, state), "fp8-block", tmp_path / "out", overwrite=True)
    assert "compressed-tensors" in (tmp_path / "out" / "config.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "nan", "out", "photos", "s.gguf"]


def test_int4_scales_are_searched_and_codes_do_not_depend_on_the_rows_beside():
    rows = torch.randn(70, 256, generator=torch.Generator().manual_seed(3)) ** 3
    words, scales = quantise_rows(rows, 128)

    def error(scale):
        spread = scale.float().repeat_interleave(128, 1)
        return ((rows / spread).round().clamp(-8, 7) * spread - rows).square().sum()

    plain = (rows.view(70, 2, 128).abs().amax(2) / 7.5).bfloat16()
    assert error(scales) < 0.95 * error(plain)
    assert all(
        torch.equal(part[9], whole)
        for part, whole in zip(quantise_rows(rows[9:10].expand(10, -1), 128), (words[9], scales[9]), strict=True)
    )
    assert torch.equal(quantise_rows(torch.zeros(1, 128), 128)[0], torch.full((1, 16), -0x77777778, dtype=torch.int32))
    assert [group_of(columns) for columns in (576, 1536, 160, 48)] == [64, 128, 32, None]


def test_only_matrices_of_layers_are_linear():
    assert {name for name in random_state(TINY) if not is_linear(name)} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    }
