"""Tokenizers of all three kinds as the grammar engine reads them."""

import functools
import json
import random
import shutil

import numpy as np
import pytest

from specengine import SamplingParams
from specengine.constraints import Grammars
from specengine.constraints.vocabulary import VocabularyReader, read_vocabulary
from specengine.draft_trees.tree import DraftTree
from specengine.tokenizer import Tokenizer
from tests.constraints.masks import tokens_of
from tests.constraints.vocabulary import CALL, ENDS, TOKENIZER
from tests.tokenizer.folder_layouts import with_tokens, write
from tests.tokenizer.vocabularies import sentencepiece_file, sentencepiece_metadata, write_folder

SCHEMA = {"enum": [{"the answer": 12, "é": ["  two  spaces", None]}, {"the other": True}]}


def folder_tokenizer(path) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(path / "json", tokenizer_config__json={"eos_token": "</s>"}))


def model_file_tokenizer(path) -> Tokenizer:
    (path / "llama").mkdir()
    shutil.copy(sentencepiece_file(), path / "llama" / "tokenizer.model")
    return Tokenizer.from_folder(path / "llama")


KINDS = {
    "tokenizer.json": folder_tokenizer,
    "tokenizer.model": model_file_tokenizer,
    "gguf, byte level": lambda path: TOKENIZER,
    "gguf, sentencepiece": lambda path: Tokenizer.from_gguf(sentencepiece_metadata()),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("tokenizer"))


def text_behind(tokenizer: Tokenizer, ids) -> str:
    """A text as a request gets it: its prompt ends with a letter."""
    detokenizer = tokenizer.detokenizer()
    detokenizer.feed(tokenizer.encode("a"))
    return detokenizer.feed(ids) + detokenizer.finish()


@functools.cache
def grammars_of(tokenizer: Tokenizer) -> Grammars:
    """Of a model that has more rows than its tokenizer has entries."""
    return Grammars(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size + 40)


def walk(tokenizer: Tokenizer, rng: random.Random, **given) -> tuple[str, int]:
    """A text drawn from a constraint's masks, and how many of its tokens were forced."""
    size, constraint = tokenizer.vocab_size + 40, grammars_of(tokenizer).constraint(SamplingParams(**given))
    text, forced, row = [], 0, np.zeros((1, -(-size // 32)), dtype=np.int32)
    while True:
        root = DraftTree([0], [-1])
        forced += bool(constraint.cut(root).forced)
        constraint.fill(root, row)
        token = rng.choice(tokens_of(row[0]))
        assert token < tokenizer.vocab_size
        if token in tokenizer.eos_token_ids:
            return text_behind(tokenizer, text), forced
        text.append(token)
        constraint.advance([token])


def test_texts_of_every_kind_of_tokenizer_are_those_of_the_constraint(tokenizer):
    rng, found = random.Random(2), set()
    for _ in range(12):
        text, forced = walk(tokenizer, rng, json_schema=SCHEMA)
        assert json.loads(text) in SCHEMA["enum"] and text == json.dumps(json.loads(text), ensure_ascii=False)
        assert forced > 2
        found.add(text)
        spaced, _ = walk(tokenizer, rng, regex=" ?[ab]{2} é+ ")
        assert spaced.strip(" ")[:2].strip("ab") == "" and spaced.endswith(" ")
    assert len(found) == 2


def test_forced_text_is_encoded_as_in_the_middle_of_a_text(tokenizer):
    reader = VocabularyReader(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size)
    whole = tokenizer.encode("the a b é", add_special_tokens=False)
    for text in ("b", " b", '": "', "é b", "a  b"):
        ids = reader(text)
        assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert reader(" b") == whole[whole.index(reader(" b")[0]) :][:1] or len(reader(" b")) > 1


def test_the_grammar_engine_has_the_bytes_of_our_decoder(tokenizer):
    vocabulary = read_vocabulary(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size)
    assert vocabulary.is_canonical and vocabulary.eos_tokens == sorted(tokenizer.eos_token_ids)
    special = {
        token for token, (text, marked) in tokenizer.added_tokens.items() if marked or text[0] + text[-1] == "<>"
    }
    for token in range(0, tokenizer.vocab_size, 1 + tokenizer.vocab_size // 2000):
        if tokenizer.token_bytes(token)[:1] == b"\xff":  # no text has this byte
            continue
        assert vocabulary.is_special_token(token) == (token in special)
        if token not in special:
            assert vocabulary.decode_bytes([token]) == tokenizer.token_bytes(token)


def test_a_text_that_spells_special_tokens_is_encoded_without_them():
    reader = VocabularyReader(TOKENIZER, ENDS, 320)
    ids = reader("a<call><call> <end>")
    assert not {*ids} & {CALL, *ENDS} and TOKENIZER.decode(ids) == "a<call><call> <end>"


def test_a_mark_that_is_matched_in_normalised_text_is_spelled_out_too(tmp_path):
    saved = with_tokens("llama", "<tool>")
    tokenizer = Tokenizer.from_folder(write(tmp_path, {"tokenizer.json": saved, "tokenizer_config.json": {}}))
    assert tokenizer.encode("a <tool>")[-1] == tokenizer.vocab_size - 1
    ids = VocabularyReader(tokenizer, [2], 320)(" <tool></s><tool>")
    assert max(ids) < tokenizer.vocab_size - 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" <tool></s><tool>"
