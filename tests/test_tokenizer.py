"""Tokenizers from model folders and GGUF metadata."""

import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from specengine.text import Tokenizer
from specengine.text.detokenizer import byte_alphabet
from specengine.text.pre_tokenizers import rules_for

LETTERS = {byte: char for char, byte in byte_alphabet().items()}
BYTES = [LETTERS[byte] for byte in range(256)]
USER = [{"role": "user", "content": "hi"}]


def gguf_metadata(**changes) -> dict:
    """Byte-level: 256 bytes, "th" 256, "the" 257, control <s> 258 and </s> 259, user-defined <tool> 260."""
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*BYTES, "th", "the", "<s>", "</s>", "<tool>"],
        "token_type": [1] * 258 + [3, 3, 4],
        "merges": ["t h", "th e"],
        "bos_token_id": 258,
        "eos_token_id": 259,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def json_backend(prefix_bos: bool = True) -> tokenizers.Tokenizer:
    """The same vocabulary as a tokenizer.json, with BOS put before the text or not."""
    vocab = {token: index for index, token in enumerate([*BYTES, "th", "the", "<s>", "</s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if prefix_bos:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
        backend.post_processor = template
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer | None = None, **files) -> Path:
    """A model folder; keyword names with __ for the dot, dicts become JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or json_backend()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def sentencepiece_file() -> Path:
    package = pytest.importorskip("mistral_common")
    path = Path(package.__file__).parent / "data" / "tokenizer.model.v1"
    if not path.is_file():
        pytest.skip("mistral_common ships no tokenizer.model.v1")
    return path


@pytest.fixture(scope="module")
def sentencepiece_model():
    sentencepiece = pytest.importorskip("sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file()))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    shutil.copy(sentencepiece_file(), folder / "tokenizer.model")
    return folder


# ---- GGUF, byte level


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


ROUND_TRIP = Tokenizer.from_gguf(gguf_metadata(pre="smollm"))


@given(st.text())
def test_any_text_survives_byte_level_encoding_and_decoding(text):
    assert ROUND_TRIP.decode(ROUND_TRIP.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It|'s|Ġ2024|,|ĠI|'|LL|ĠĠ|Ġgo|Ċ|Ċ|x"),
        ("smollm", "It|'s|Ġ|2|0|2|4|,|ĠI|'|LL|ĠĠ|Ġgo|Ċ|Ċ|x"),
        ("llama-bpe", "It|'s|Ġ|202|4|,|ĠI|'LL|ĠĠ|Ġgo|ĊĊ|x"),
        ("qwen2", "It|'s|Ġ|2|0|2|4|,|ĠI|'LL|ĠĠ|Ġgo|ĊĊ|x"),
        ("tekken", "It|'s|Ġ|2|0|2|4|,|ĠI|'LL|ĠĠ|Ġgo|ĊĊ|x"),
        ("deepseek-coder", "It|'|s|Ġ|2|0|2|4|,|ĠI|'|LL|ĠĠ|Ġgo|Ċ|Ċ|x"),
        ("deepseek-llm", "It|'|s|Ġ|2|0|2|4|,|ĠI|'|LL|ĠĠ|Ġgo|Ċ|Ċ|x"),
    ],
)
def test_each_vocabulary_cuts_words_its_own_way(pre, words):
    pieces = rules_for(pre).words().pre_tokenize_str("It's 2024, I'LL   go\n\nx")
    assert "|".join(piece for piece, _ in pieces) == words


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


# ---- text and chat


@pytest.mark.parametrize("text", [None, 3, b"hi", ["hi"], "a\ud800", "\udcff"])
def test_text_that_is_not_a_unicode_string_is_refused(text):
    with pytest.raises(ValueError, match="text"):
        Tokenizer.from_gguf(gguf_metadata()).encode(text)


def test_ids_without_an_entry_have_no_text_and_negative_ones_are_refused():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert tokenizer.decode([257, 5000]) == "the"
    with pytest.raises(ValueError, match="ids must be token ids, got -1"):
        tokenizer.decode([-1])


def test_ids_may_be_elements_of_an_array():
    torch = pytest.importorskip("torch")
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert tokenizer.decode(torch.tensor([258, 257])) == "the"


def test_one_token_is_shown_with_its_space_and_special_tokens_spelled_out():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert [tokenizer.token_text(token) for token in (32, 257, 258, 0xC3)] == [" ", "the", "<s>", "\ufffd"]


def test_a_chat_is_encoded_with_its_special_tokens_and_one_bos():
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    metadata = gguf_metadata(add_bos_token=True) | {"tokenizer.chat_template": template}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(USER) == "<s>hi</s>"
    assert tokenizer.encode_chat(USER) == [258, ord("h"), ord("i"), 259]


def test_built_in_formats_get_bos_from_the_tokenizer_once():
    tokenizer = Tokenizer.from_gguf(gguf_metadata(add_bos_token=True), chat_format="vicuna")
    assert tokenizer.render_chat(USER).startswith("A chat between")
    assert tokenizer.encode_chat(USER)[:2] == [258, ord("A")]
    tokenizer = Tokenizer.from_gguf(gguf_metadata(add_bos_token=True), chat_format="llama-2")
    assert tokenizer.encode_chat(USER)[:2] == [258, ord("[")]


def test_the_model_name_chooses_a_format_only_without_a_template():
    metadata = gguf_metadata() | {"general.name": "Vicuna 7B v1.5"}
    assert Tokenizer.from_gguf(metadata).render_chat(USER).endswith("USER: hi ASSISTANT:")
    metadata["tokenizer.chat_template"] = "own"
    assert Tokenizer.from_gguf(metadata).render_chat(USER) == "own"
    assert Tokenizer.from_gguf(metadata, chat_format="llama-2").render_chat(USER) == "<s>[INST] hi [/INST]"


def test_a_tokenizer_without_a_template_says_so():
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template; choose a chat_format"):
        tokenizer.render_chat(USER)


# ---- tokenizer.json


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
            {"tokenizer_config__json": {"bos_token": "<none>"}},
            r"tokenizer_config\.json: bos_token '<none>' is not",
        ),
        (
            {"generation_config__json": {"eos_token_id": "x"}},
            r"generation_config\.json: eos_token_id must be",
        ),
        ({"chat_template__jinja": "{% if %}"}, r"chat_template\.jinja: chat template is not valid Jinja"),
        ({"tokenizer_config__json": {"chat_template": 3}}, r"tokenizer_config\.json: chat_template must be"),
        (
            {"tokenizer_config__json": {"chat_template": {"a": "x", "b": "y"}}},
            r"tokenizer_config\.json: chat_template names a, b but none is 'default'",
        ),
    ],
)
def test_a_corrupt_file_is_named(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(write_folder(tmp_path, **files))


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


# ---- sentencepiece


def random_texts(count: int) -> list[str]:
    rng = random.Random(7)
    words = [
        "the",
        " ",
        "  ",
        "Hello",
        "ing",
        "\n",
        "    ",
        "é",
        "你",
        "🦙",
        "def",
        "(",
        "12",
        "aaa",
        "===",
        "\t",
    ]
    return ["".join(rng.choice(words) for _ in range(rng.randrange(30))) for _ in range(count)]


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


def test_legacy_decides_whether_a_space_follows_special_tokens(llama_folder, tmp_path):
    legacy = Tokenizer.from_folder(llama_folder)
    assert [legacy.token_text(token) for token in legacy.encode("a</s>b")] == ["<s>", " a", "</s>", " b"]
    shutil.copy(llama_folder / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    newer = Tokenizer.from_folder(tmp_path)
    assert [newer.token_text(token) for token in newer.encode("a</s>b")] == ["<s>", " a", "</s>", "b"]


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
    with pytest.raises(ValueError, match="added token '<late>' has id 40000 but would become 32002"):
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


# ---- a real model


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(smollm2_path).fields
    return Tokenizer.from_gguf({key: field.contents() for key, field in fields.items()})


@pytest.mark.model
def test_smollm2_encodes_a_chat_as_its_reference_does(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France? Explain in two sentences."}]
    # fmt: off
    expected = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
        8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 16374, 281, 827, 8545, 30, 2, 198,
        1, 520, 9531, 198,
    ]
    # fmt: on
    assert smollm2.encode_chat(messages) == expected
    assert smollm2.decode(expected, skip_special_tokens=False) == smollm2.render_chat(messages)
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, (2,), 49152)


@pytest.mark.model
def test_smollm2_encodes_as_transformers_does(smollm2, smollm2_path):
    transformers = pytest.importorskip("transformers")
    folder, name = str(smollm2_path.parent), smollm2_path.name
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    texts = [
        "def f(x):\n    return x**2  # square\n\n\n",
        "In 2024, π ≈ 3.14159; 1,000,000 · 0x1F",
        "café naïve Ünïcode 你好世界 🦙🏽👨‍👩‍👧 e\u0301\u200b",
        "   lead\t\ttab \r\n\r\n x   ",
        "I'm you're IT'S <|im_start|>user\nhi<|im_end|> a<|endoftext|>b",
        "",
    ]
    # They leave out this vocabulary's splitting of digits, which shows after a run of spaces.
    for text in [*texts, *(text.replace("12", "") for text in random_texts(100))]:
        ids = smollm2.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
