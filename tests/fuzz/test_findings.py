"""What fuzzing found, and what was found while reading for it: each input once crashed, hung or named nothing."""

import json
import struct
from decimal import Decimal
from fractions import Fraction

import pytest
import tokenizers
from tokenizers import models, normalizers

from specengine import SamplingParams
from specengine.bench.race.questions import load_questions
from specengine.models.checkpoint import open_checkpoint
from specengine.models.checkpoint_base import validate_tensors
from specengine.models.checkpoint_hf import SafetensorsCheckpoint
from specengine.models.config_hf import config_from_hf
from specengine.models.gguf_file import GGUFFile
from specengine.models.torch_file import TorchFile
from specengine.tokenizer import Tokenizer
from specengine.utils.json_file import read_json_object
from tests.fuzz import seeds
from tests.tokenizer.vocabularies import BYTES, gguf_metadata, json_backend, write_folder

DEEP = "[" * 100_000


def folder_of(path, config=None, index=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**seeds.CONFIG, **(config or {})}))
    (path / "model.safetensors").write_bytes(seeds.safetensors()[0])
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def test_json_too_deep_for_the_parser_names_its_file(tmp_path):
    (tmp_path / "deep.json").write_text('{"a": ' + DEEP)
    with pytest.raises(ValueError, match=r"deep\.json: not valid JSON"):
        read_json_object(tmp_path / "deep.json")


def test_json_too_large_for_its_objects_is_refused_unread(tmp_path):
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(1 << 40)  # a hole: nothing is stored
    with pytest.raises(ValueError, match=r"large\.json: expected at most 64 MiB"):
        read_json_object(tmp_path / "large.json")


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}}, "rope_scaling: field 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": float("nan")}}, "mscale"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "needs a theta other than 1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**400}},
            "original_max",
        ),
        ({"num_hidden_layers": -1}, "config.json: num_layers"),
        ({"vocab_size": 10**400}, "vocab_size is impossibly large"),
        ({"architectures": ["Qwen3NextForCausalLM"], "head_dim": 10**400}, "'head_dim' is impossibly large"),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        config_from_hf({**seeds.CONFIG, **changes})


def test_more_layers_than_tensors_are_refused_before_their_names_are_made(tmp_path):
    with pytest.raises(ValueError, match="fewer tensors than layers, 10000"):
        validate_tensors(SafetensorsCheckpoint(folder_of(tmp_path, {"num_hidden_layers": 10_000})))


@pytest.mark.parametrize(
    "shard",
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", "x" * 5000, "a\0b", "\ud800", 3, None, ["x"]],
    ids=lambda shard: repr(shard)[:20],
)
def test_a_shard_is_a_file_of_the_folder(tmp_path, shard):
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: shard"):
        open_checkpoint(folder_of(tmp_path, index=dict.fromkeys(seeds.state(), shard)))


def _header(*keys: bytes, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(keys)) + b"".join(keys)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    "content, named",
    [
        (_header(_text("split.count") + struct.pack("<I", 8) + _text("two")), "split.count"),
        (_header(tensors=1) + _text("t") + struct.pack("<I", 9) + b"\xff" * 80, "'t' has 9 dimensions"),
        (
            _header(_text("k") + struct.pack("<IIQ", 9, 0, 1 << 24) + bytes(1 << 24)),
            "'k' brings the header to more than",
        ),
    ],
    ids=["a text for a number", "dimensions", "a long array"],
)
def test_a_header_of_gguf_is_refused_by_name(tmp_path, content, named):
    (tmp_path / "file.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=named):
        GGUFFile(tmp_path / "file.gguf")


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"pre": ["gpt-2"]}, r"tokenizer\.ggml\.pre \['gpt-2'\] is not supported"),
        ({"tokens": [*BYTES, "a" * 100_000]}, r"tokenizer\.ggml\.tokens: an entry has 100000 characters"),
        (
            {"model": "llama", "tokens": ["a", "b"], "scores": [0.0, 0.0], "token_type": [2, 2, 2]},
            r"tokenizer\.ggml\.token_type",
        ),
    ],
)
def test_a_vocabulary_of_gguf_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        Tokenizer.from_gguf(gguf_metadata(**changes))


@pytest.mark.parametrize(
    "files, named",
    [
        (
            {"tokenizer_config__json": {"chat_template": {"default": 5}}},
            r"tokenizer_config\.json: chat_template must be",
        ),
        ({"tokenizer_config__json": {"chat_template": [{"name": [], "template": "x"}]}}, "chat_template must be"),
        ({"tokenizer_config__json": {"add_bos_token": "no"}}, r"tokenizer_config\.json: field 'add_bos_token'"),
        ({"tokenizer_config__json": {"bos_token": "\ud800"}}, r"tokenizer_config\.json: bos_token"),
    ],
)
def test_a_configuration_of_a_tokenizer_is_refused_by_name(tmp_path, files, named):
    with pytest.raises(ValueError, match=named):
        Tokenizer.from_folder(write_folder(tmp_path, **files)).render_chat([{"role": "user", "content": "x"}])


def test_replacements_that_double_a_text_again_and_again_are_refused(tmp_path):
    backend = json_backend()
    backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    with pytest.raises(ValueError, match=r"tokenizer\.json: replacements make a text 1\.1e\+12 times as long"):
        Tokenizer.from_folder(write_folder(tmp_path, backend))


def test_a_tokenizer_without_the_letters_of_a_text_says_so(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"x": 0}, unk_token="none"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot encode a letter"):
        Tokenizer.from_folder(write_folder(tmp_path, backend))


def test_a_token_beyond_all_numbers_of_the_library_is_nothing(tmp_path):
    assert Tokenizer.from_folder(write_folder(tmp_path)).decode([1 << 40]) == ""


@pytest.mark.parametrize(
    "line", ['{"turns": ' + DEEP, '{"turns": ' + "9" * 5000, '{"turns": ' + "[" * 900 + "]" * 900 + "}"]
)
def test_a_question_names_its_line(tmp_path, line):
    (tmp_path / "q.jsonl").write_text('{"turns": ["a"]}\n' + line)
    with pytest.raises(ValueError, match=r"q\.jsonl, line 2"):
        load_questions(tmp_path / "q.jsonl")


SIZES = {"400 digits": 10**400, "5000 digits": 10**5000, "below zero": -(10**5000), "NaN": float("nan")}
SIZES |= {"a fraction": Fraction(10**5000), "a decimal": Decimal("1e999")}


@pytest.mark.parametrize("name", ["temperature", "top_k", "seed", "stop", "trace", "logit_bias"])
@pytest.mark.parametrize("value", SIZES.values(), ids=SIZES)
def test_a_parameter_of_any_size_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: ") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 300


def test_a_name_in_a_zip_file_that_is_no_text_names_the_file(tmp_path):
    data = seeds.torch_files()[0].replace(b"file/byteorder", b"file/\xff\xfe\xfd\xfcorder")
    at = data.index(b"PK\x01\x02")
    while at >= 0:  # the flag that says a name is UTF-8, in every entry of the directory
        data = data[: at + 9] + b"\x08" + data[at + 10 :]
        at = data.find(b"PK\x01\x02", at + 4)
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: not an intact PyTorch zip file"):
        TorchFile(tmp_path / "pytorch_model.bin")


def test_merges_are_never_left_out_at_random(tmp_path):
    spec = json.loads(json_backend().to_str())
    spec["model"]["dropout"] = 0.9
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, tokenizer__json=spec))
    assert all(tokenizer.encode("thethethe", add_special_tokens=False) == [257] * 3 for _ in range(20))


def test_half_of_a_surrogate_pair_in_a_template_names_it(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, tokenizer_config__json={"chat_template": "\ud800"}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat template failed"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
