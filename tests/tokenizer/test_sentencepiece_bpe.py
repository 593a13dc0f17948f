"""Tokenizers of tokenizer.model encode like the sentencepiece library."""

import json
import shutil
from pathlib import Path

import pytest

from specengine.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import random_texts, sentencepiece_file


@pytest.fixture(scope="module")
def sentencepiece_model():
    sentencepiece = pytest.importorskip("sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file()))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    shutil.copy(sentencepiece_file(), folder / "tokenizer.model")
    return folder


def test_tokenizer_model_encodes_and_decodes_as_sentencepiece_does(llama_folder, sentencepiece_model):
    tokenizer = Tokenizer.from_folder(llama_folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (2,), 32000)
    for text in random_texts(300):
        ids = sentencepiece_model.encode(text)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text


def test_a_sentencepiece_gguf_encodes_as_sentencepiece_does(sentencepiece_model):
    count = sentencepiece_model.vocab_size()
    types = [2, 3, 3] + [6] * 256 + [1] * (count - 259)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sentencepiece_model.id_to_piece(index) for index in range(count)],
        "tokenizer.ggml.scores": [sentencepiece_model.get_score(index) for index in range(count)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in random_texts(100):
        assert tokenizer.encode(text) == [1, *sentencepiece_model.encode(text)]
    bare = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_space_prefix": False})
    ids = bare.encode("Hello", add_special_tokens=False)
    assert (bare.token_text(ids[0])[0], bare.decode(ids)) == ("H", "Hello")


@pytest.mark.full
def test_legacy_decides_whether_a_space_follows_special_tokens(llama_folder, tmp_path):
    legacy = Tokenizer.from_folder(llama_folder)
    assert [legacy.token_text(token) for token in legacy.encode("a</s>b")] == ["<s>", " a", "</s>", " b"]
    shutil.copy(llama_folder / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    newer = Tokenizer.from_folder(tmp_path)
    assert [newer.token_text(token) for token in newer.encode("a</s>b")] == ["<s>", " a", "</s>", "b"]


@pytest.mark.full
def test_tokens_added_to_tokenizer_model_keep_their_ids(llama_folder, tmp_path):
    shutil.copy(llama_folder / "tokenizer.model", tmp_path)
    decoder = {
        "32000": {"content": "<pad>", "special": True},
        "32001": {"content": "<tool>", "special": False},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("<pad><tool>")
    assert (ids, tokenizer.decode(ids), tokenizer.vocab_size) == ([1, 32000, 32001], "<tool>", 32002)
    (tmp_path / "added_tokens.json").write_text('{"<late>": 40000}')
    assert Tokenizer.from_folder(tmp_path).vocab_size == 32002  # the older file counts only without the other
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="added token '<late>' has id 40000 but would become 32000"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_a_corrupt_tokenizer_model_is_named(tmp_path, content):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.model: not a sentencepiece model"):
        Tokenizer.from_folder(tmp_path)


def test_a_unigram_model_is_refused(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentences = iter(["the cat sat on the mat", "a dog ran in the park", "hello world again"] * 20)
    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences, model_writer=file, vocab_size=25, model_type="unigram", minloglevel=2
        )
    with pytest.raises(ValueError, match=r"tokenizer\.model: encodes unlike a sentencepiece BPE model"):
        Tokenizer.from_folder(tmp_path)
