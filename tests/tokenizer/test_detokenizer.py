"""Incremental detokenisation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import BYTES, sentencepiece_metadata


def byte_level() -> Tokenizer:
    """The 256 bytes (id = byte), "th" (256) and the control token <eos> (257)."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*BYTES, "th", "<eos>"],
            "tokenizer.ggml.token_type": [1] * 257 + [3],
            "tokenizer.ggml.merges": ["t h"],
            "tokenizer.ggml.eos_token_id": 257,
        }
    )


BYTE_LEVEL, SENTENCEPIECE = byte_level(), Tokenizer.from_gguf(sentencepiece_metadata())


def test_a_character_is_given_out_only_when_all_its_bytes_have_come():
    detokenizer = BYTE_LEVEL.detokenizer()
    assert [detokenizer.feed([byte]) for byte in "é🦙".encode()] == ["", "é", "", "", "", "🦙"]
    assert detokenizer.finish() == ""


def test_bytes_left_incomplete_become_the_replacement_character_at_the_end():
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.feed([ord("x"), *"🦙".encode()[:3]]) == "x"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.feed([ord("y")]) == "y"


def test_a_character_broken_off_by_other_text_becomes_the_replacement_character():
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.feed([0xE4, 0xBD]) == ""
    assert detokenizer.feed([256]) == "\ufffdth"


def test_special_tokens_are_skipped_unless_asked_for():
    assert BYTE_LEVEL.detokenizer().feed([256, 257]) == "th"
    assert BYTE_LEVEL.detokenizer(skip_special_tokens=False).feed([256, 257]) == "th<eos>"


def test_detokenizers_are_independent():
    first, second = BYTE_LEVEL.detokenizer(), BYTE_LEVEL.detokenizer()
    assert first.feed([0xC3]) == ""
    assert second.feed([0xA9]) == "\ufffd"
    assert first.feed([0xA9]) == "é"


def test_sentencepiece_drops_the_space_before_the_first_word_only():
    detokenizer = SENTENCEPIECE.detokenizer()
    ids = SENTENCEPIECE.encode("a b  a")
    assert "".join(detokenizer.feed([token]) for token in ids) == "a b  a"


def test_a_continuation_keeps_its_space_when_the_prompt_was_fed_first():
    detokenizer = SENTENCEPIECE.detokenizer()
    detokenizer.feed(SENTENCEPIECE.encode("a"))
    assert detokenizer.feed(SENTENCEPIECE.encode("b", add_special_tokens=False)) == " b"


def test_byte_fallback_tokens_join_into_characters():
    ids = SENTENCEPIECE.encode("a🦙")
    assert len(ids) == 2 + 4
    assert SENTENCEPIECE.decode(ids) == "a🦙"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
@given(data=st.data())
def test_pieces_of_any_split_join_to_the_decoded_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer, text, at = tokenizer.detokenizer(skip), "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        text += detokenizer.feed(ids[at : at + step])
        at += step
    assert text + detokenizer.finish() == tokenizer.decode(ids, skip)


@given(st.lists(st.integers(0, 257), max_size=40))
def test_byte_level_decoding_equals_the_bytes_decoded_at_once(ids):
    spelled = {256: b"th", 257: b"<eos>"}
    data = b"".join(spelled.get(token) or bytes([token]) for token in ids)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == data.decode("utf-8", errors="replace")


def test_feeding_costs_the_new_tokens_only():
    asked = []
    tokenizer = byte_level()
    detokenizer = tokenizer.detokenizer()
    look_up = detokenizer._piece_bytes
    detokenizer._piece_bytes = lambda token: (asked.append(token), look_up(token))[1]
    for _ in range(100):
        detokenizer.feed([256])
    assert len(asked) == 100


def test_hidden_tokens_have_no_text_where_special_tokens_have_one():
    ids = [*b"a", 257, *b"b"]
    assert BYTE_LEVEL.detokenizer().feed(ids) == "ab"
    assert BYTE_LEVEL.detokenizer(skip_special_tokens=False).feed(ids) == "a<eos>b"
    assert BYTE_LEVEL.detokenizer(skip_special_tokens=False, hidden=(257,)).feed(ids) == "ab"
