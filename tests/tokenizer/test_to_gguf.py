"""Tokenizers of folders as GGUF metadata: the same ids, the same frame, and refusals."""

import shutil

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from specengine.tokenizer.pre_tokenizers import rules_for
from specengine.tokenizer.to_gguf import gguf_metadata
from specengine.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import json_backend, random_texts, sentencepiece_file, write_folder

NAMES = {"tokenizer_config__json": {"bos_token": "<s>", "eos_token": "</s>"}}


def check_same(folder, count, ends=()):
    metadata = gguf_metadata(folder, count, ends)
    ours, theirs = Tokenizer.from_gguf(metadata), Tokenizer.from_folder(folder)
    for text in (*random_texts(60), "the 12345678 I'LL\n\n x/y", "<s>the</s> <tool>"):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert len(metadata["tokenizer.ggml.tokens"]) == len(metadata["tokenizer.ggml.token_type"]) == count
    return metadata


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "deepseek-coder", "deepseek-llm"])
def test_the_name_of_the_rules_is_found_by_their_effect(tmp_path, name):
    rules, backend = rules_for(name), json_backend(prefix_bos=name == "llama-bpe")
    backend.model = models.BPE(
        vocab={token: index for token, index in json_backend().get_vocab().items() if index < 258},
        merges=[("t", "h"), ("th", "e")],
        ignore_merges=rules.ignore_merges,
    )
    backend.pre_tokenizer = rules.words()
    if rules.normalizer is not None:
        backend.normalizer = rules.normalizer
    metadata = check_same(write_folder(tmp_path / "m", backend, **NAMES), 264)
    assert metadata["tokenizer.ggml.pre"] == name
    assert metadata["tokenizer.ggml.add_bos_token"] is (name == "llama-bpe")


def test_kinds_of_entries_padding_ends_and_template_are_written(tmp_path):
    backend = json_backend()
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    config = NAMES["tokenizer_config__json"] | {"chat_template": "{{ messages }}"}
    folder = write_folder(tmp_path / "m", backend, tokenizer_config__json=config)
    metadata = check_same(folder, 264, ends=(259, 260))
    get = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}.get
    assert get("tokens")[256:] == ["th", "the", "<s>", "</s>", "<tool>", "[PAD261]", "[PAD262]", "[PAD263]"]
    assert get("token_type")[256:] == [1, 1, 3, 3, 4, 5, 5, 5]
    assert (get("bos_token_id"), get("eos_token_id"), get("eot_token_id")) == (258, 259, 260)
    assert get("tokenizer.chat_template") == "{{ messages }}" and get("add_eos_token") is False


@pytest.mark.full
def test_a_sentencepiece_model_is_written_with_its_scores(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    shutil.copyfile(sentencepiece_file(), folder / "tokenizer.model")
    metadata = check_same(folder, 32010)
    assert metadata["tokenizer.ggml.model"] == "llama" and metadata["tokenizer.ggml.tokens"][32009] == "[PAD32009]"
    assert len(metadata["tokenizer.ggml.scores"]) == 32010 and metadata["tokenizer.ggml.scores"][300] < 0


def unknown_rules(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(False)])


def no_merges(backend):
    vocab = {token: index for token, index in json_backend().get_vocab().items() if index < 256}
    backend.model = models.BPE(vocab=vocab, merges=[])


def greedy_token(backend):
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])


def token_with_its_space(backend):
    backend.normalizer = normalizers.Prepend(" ")
    backend.add_tokens([AddedToken("<mask>", normalized=True)])


def other_frame(backend):
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 259)])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (unknown_rules, "splits text into words unlike gpt-2"),
        (no_merges, "has no merges"),
        (greedy_token, "'<mask>' takes the spaces beside it"),
        (token_with_its_space, "'<mask>' takes the spaces beside it"),
        (other_frame, "other tokens than BOS and EOS"),
    ],
)
def test_what_gguf_cannot_say_is_refused_by_name(tmp_path, change, named):
    backend = json_backend()
    change(backend)
    with pytest.raises(ValueError, match=rf"tokenizer\.json: .*{named}"):
        gguf_metadata(write_folder(tmp_path / "m", backend, **NAMES), 264)


def test_more_ends_than_gguf_has_room_for_and_other_models_are_refused(tmp_path):
    folder = write_folder(tmp_path / "m", **NAMES)
    assert gguf_metadata(folder, 264, ends=(1, 2))["tokenizer.ggml.eom_token_id"] == 2
    with pytest.raises(ValueError, match="4 tokens end a text; a GGUF file has room for 3"):
        gguf_metadata(folder, 264, ends=(1, 2, 3))
    unigram = Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    unigram.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match=r"tokenizer\.model beside it"):
        gguf_metadata(write_folder(tmp_path / "n", unigram), 264)
