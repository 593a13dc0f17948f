"""Vocabularies in model folders: tokenizer.json and the files around it."""

import pytest
import tokenizers
from tokenizers import decoders, models, processors

from specengine.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import json_backend, write_folder

USER = [{"role": "user", "content": "hi"}]


def test_tokenizer_json_decides_about_bos_unless_the_config_does(tmp_path):
    bos = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    assert Tokenizer.from_folder(write_folder(tmp_path / "a")).encode("th") == [258, 256]
    folder = write_folder(tmp_path / "b", tokenizer_config__json={**bos, "add_bos_token": False})
    assert Tokenizer.from_folder(folder).encode("th") == [256]
    folder = write_folder(tmp_path / "c", json_backend(False), tokenizer_config__json={**bos, "add_bos_token": True})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("th") == [258, 256]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (258, (259,), 260)


def test_bos_of_tokenizer_json_goes_first_even_if_the_vocabulary_is_tiny(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE(vocab={"x": 0, "<s>": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert Tokenizer.from_folder(write_folder(tmp_path, backend)).encode("xx") == [1, 0, 0]


def test_a_config_that_wants_bos_must_have_one(tmp_path):
    folder = write_folder(tmp_path, tokenizer_config__json={"add_bos_token": True})
    with pytest.raises(ValueError, match=r"tokenizer\.json: add_bos_token is true but there is no bos token"):
        Tokenizer.from_folder(folder)


def test_truncation_and_padding_in_tokenizer_json_are_ignored(tmp_path):
    backend = json_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.encode("th" * 5) == [258] + [256] * 5


def test_special_tokens_come_from_the_map_and_end_tokens_also_from_the_generation_config(tmp_path):
    folder = write_folder(
        tmp_path,
        special_tokens_map__json={"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        generation_config__json={"eos_token_id": [257, 259]},
        config__json={"eos_token_id": 1},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (258, (259, 257))


def test_config_json_gives_the_end_token_as_a_last_resort(tmp_path):
    assert Tokenizer.from_folder(write_folder(tmp_path, config__json={"eos_token_id": 259})).eos_token_ids == (259,)


@pytest.mark.parametrize(
    ("files", "rendered"),
    [
        ({"tokenizer_config__json": {"chat_template": "one"}}, "one"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "two"},
                    ]
                }
            },
            "two",
        ),
        ({"chat_template__json": {"chat_template": "three"}}, "three"),
        ({"chat_template__jinja": "four", "tokenizer_config__json": {"chat_template": "one"}}, "four"),
    ],
)
def test_the_template_is_found_in_every_place_it_may_be(tmp_path, files, rendered):
    assert Tokenizer.from_folder(write_folder(tmp_path, **files)).render_chat(USER) == rendered


def test_the_folder_name_chooses_a_chat_format(tmp_path):
    assert Tokenizer.from_folder(write_folder(tmp_path / "vicuna-7b")).has_chat_template
    cached = write_folder(tmp_path / "models--x--Llama-2-7b-chat" / "snapshots" / "abc123")
    assert "[INST]" in Tokenizer.from_folder(cached).render_chat(USER)
    assert not Tokenizer.from_folder(write_folder(tmp_path / "other")).has_chat_template


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": "{"}, r"tokenizer\.json: not a valid tokenizer\.json"),
        ({"tokenizer__json": ""}, r"tokenizer\.json: not a valid tokenizer\.json"),
        ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json: not valid JSON"),
        ({"tokenizer_config__json": "[]"}, r"tokenizer_config\.json: expected a JSON object"),
        (
            {"generation_config__json": {"eos_token_id": "x"}},
            r"generation_config\.json: eos_token_id must be",
        ),
    ],
)
def test_a_corrupt_file_is_named(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(write_folder(tmp_path, **files))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"chat_template__jinja": "{% if %}"}, r"chat_template\.jinja: chat template is not valid Jinja: .*line 1"),
        ({"chat_template__jinja": "x" * 200_000}, r"chat_template\.jinja: chat template has 200000 characters"),
        ({"chat_template__jinja": ""}, r"chat_template\.jinja: chat template gives an empty text"),
        ({"chat_template__json": {"chat_template": "{{ x("}}, r"chat_template\.json: chat template is not valid Jinja"),
        ({"tokenizer_config__json": {"chat_template": "{% set x %}"}}, r"tokenizer_config\.json: .*not valid Jinja"),
        ({"tokenizer_config__json": {"chat_template": ""}}, r"tokenizer_config\.json: .*an empty text"),
        ({"tokenizer_config__json": {"chat_template": 3}}, r"tokenizer_config\.json: chat_template must be"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default"}]}}, "chat_template must be"),
        (
            {"tokenizer_config__json": {"chat_template": {"a": "x", "b": "y"}}},
            r"tokenizer_config\.json: chat_template names a, b but none is 'default'",
        ),
    ],
)
def test_a_template_that_cannot_be_rendered_stops_chats_alone(tmp_path, files, message):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "vicuna-7b", **files))
    assert tokenizer.encode("th") == [258, 256] and tokenizer.has_chat_template
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat(USER)


def test_a_template_that_is_no_text_stops_chats_alone(tmp_path):
    (write_folder(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: not UTF-8 text"):
        Tokenizer.from_folder(tmp_path).encode_chat(USER)


def test_a_decoder_that_cannot_stream_is_refused(tmp_path):
    backend = json_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"tokenizer\.json: decoder 'WordPiece' is not supported"):
        Tokenizer.from_folder(write_folder(tmp_path, backend))


def test_a_folder_without_a_tokenizer_gives_none_or_an_error(tmp_path):
    assert Tokenizer.find(tmp_path) is None
    with pytest.raises(FileNotFoundError, match=r"no tokenizer; expected tokenizer\.json or tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Tokenizer.find(tmp_path / "missing")
    assert Tokenizer.find(write_folder(tmp_path)).vocab_size == 260
