"""Vocabularies in GGUF metadata."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import gguf_metadata


def test_byte_level_gguf_merges_and_recognises_special_tokens_in_text():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert tokenizer.encode("the<s>x<tool>") == [257, 258, ord("x"), 260]
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (261, 258, (259,))


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert tokenizer.decode([258, 257, 260, 259]) == "the<tool>"
    assert tokenizer.decode([258, 257, 260, 259], skip_special_tokens=False) == "<s>the<tool></s>"


def test_bos_and_eos_frame_the_text_as_the_metadata_says():
    tokenizer = Tokenizer.from_gguf(gguf_metadata(add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("th") == [258, 256, 259]
    assert tokenizer.encode("th", add_special_tokens=False) == [256]
    assert tokenizer.encode("") == [258, 259]


def test_a_llama_3_vocabulary_gets_bos_unless_the_metadata_says_otherwise():
    assert Tokenizer.from_gguf(gguf_metadata(pre="llama-bpe")).encode("th") == [258, 256]
    assert Tokenizer.from_gguf(gguf_metadata(pre="llama-bpe", add_bos_token=False)).encode("th") == [256]


def test_every_token_that_ends_a_turn_is_an_eos_token():
    tokenizer = Tokenizer.from_gguf(gguf_metadata(eot_token_id=260, eom_token_id=259))
    assert tokenizer.eos_token_ids == (259, 260)


def test_the_list_of_end_tokens_that_ollama_writes_is_read():
    tokenizer = Tokenizer.from_gguf(gguf_metadata(eos_token_ids=[259, 260, 999]))
    assert tokenizer.eos_token_ids == (259, 260)


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ({"": "{% if %}"}, r"tokenizer\.chat_template: chat template is not valid Jinja"),
        ({"": ""}, r"tokenizer\.chat_template: chat template gives an empty text"),
        ({"": 3}, r"tokenizer\.chat_template: chat_template must be a string"),
        ({".a": "x", ".b": "y"}, r"tokenizer\.chat_template: chat_template names a, b but none is 'default'"),
    ],
)
def test_a_template_that_cannot_be_rendered_stops_chats_alone(templates, message):
    keys = {f"tokenizer.chat_template{name}": value for name, value in templates.items()}
    tokenizer = Tokenizer.from_gguf(gguf_metadata() | keys)
    assert tokenizer.encode("the") == [257] and tokenizer.has_chat_template
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


ROUND_TRIP = Tokenizer.from_gguf(gguf_metadata(pre="smollm"))


@pytest.mark.full
@given(st.text())
def test_any_text_survives_byte_level_encoding_and_decoding(text):
    assert ROUND_TRIP.decode(ROUND_TRIP.encode(text), skip_special_tokens=False) == text


def test_qwen_text_is_composed_first():
    assert Tokenizer.from_gguf(gguf_metadata(pre="qwen2")).encode("e\u0301") == list("é".encode())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "martian"}, r"tokenizer\.ggml\.pre 'martian' is not supported"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model must be 'gpt2' or 'llama', got 'bert'"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens must be a list"),
        ({"tokens": ["a", "b", "a"]}, r"tokenizer\.ggml\.tokens has the token 'a' twice"),
        ({"merges": None}, r"tokenizer\.ggml\.merges must be a list"),
        ({"merges": ["t"]}, r"tokenizer\.ggml\.merges must be pairs"),
        ({"merges": ["t zz"]}, r"tokenizer\.ggml\.merges do not fit"),
        ({"token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 entries"),
        ({"eos_token_id": 9999}, r"tokenizer\.ggml\.eos_token_id must be a token id below 261"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is true but there is no bos token"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
    ],
)
def test_wrong_metadata_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(gguf_metadata(**changes))
