"""`specengine corpus` writes the texts of files as a corpus."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from specengine.cli.corpus_texts import without_repeats
from specengine.cli.main import app
from specengine.drafters.suffix.corpus_file import check_corpus_tokenizer, open_corpus
from specengine.tensor_parallel.loading import load_tokenizer
from specengine.train.data.dialogue_files import Dialogue, write_shard

pytestmark = pytest.mark.model


def run(*words):
    return CliRunner().invoke(app, ["corpus", *map(str, words)])


def tokens_of(path):
    from safetensors.torch import load_file

    return [token if token != 0xFFFF else -1 for token in load_file(path)["tokens"].tolist()]


def test_what_a_text_says_again_is_left_out():
    once = [*range(100, 120)]
    assert [*without_repeats(once)] == [once]
    assert [*without_repeats([1, 2])] == [[1, 2]]
    # The first seven tokens of the repeat stay, because a repeat is certain only at eight.
    assert [*without_repeats(once + once)] == [once + once[:7]]
    assert [*without_repeats(once + once + [*range(200, 210)])] == [once + once[:7], [*range(200, 210)]]
    assert [*without_repeats(once + once + [5, 6])] == [once + once[:7]]
    assert [*without_repeats([7] * 50)] == [[7] * 8]


@pytest.mark.full
def test_texts_of_all_kinds_become_one_corpus(tmp_path, smollm2_path):
    (tmp_path / "a.txt").write_text("Once upon a time")
    (tmp_path / "b.jsonl").write_text('{"text": "Once upon"}\n\n{"text": "a time"}\n')
    (tmp_path / "data").mkdir()
    write_shard(
        tmp_path / "data/dialogues-00000.safetensors", [Dialogue([*range(20), 6, 7], 20), Dialogue([8, 9], 1)], {}
    )
    out = tmp_path / "corpus.safetensors"
    result = run(tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "data", "--out", out, "--model", smollm2_path)
    assert result.exit_code == 0, result.output
    assert f"{len(tokens_of(out))} tokens in" in result.output
    tokens = tokens_of(out)
    assert tokens.count(-1) == 5 and tokens[-15:] == [-1, *range(12, 20), 6, 7, -1, 8, 9, -1]
    once = tokens[: tokens.index(-1)]
    assert len(once) == 4 and tokens[5:7] == once[:2]
    corpus = open_corpus(out, 49152)
    assert corpus.continuations([1, *once[:3]], 2, 1, 1, [1.0] * 30, 0.0)[0] == [once[2], once[3]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "cannot be read"),
        ("bad.txt", b"\xff\xfe\xff", "cannot be read"),
        ("bad.jsonl", b'{"text": "a"}\n{"txt": "b"}', "line 2: expected an object with `text`"),
        ("bad.jsonl", b"[1", "line 1: expected an object with `text`"),
        ("bad.jsonl", b"[1]", "line 1: expected an object with `text`"),
        ("bad.jsonl", b'{"text": 3}', "line 1: expected an object with `text`: text must be a string"),
        ("bad.jsonl", b'{"text": "\\ud800"}', "line 1: expected an object with `text`: text has an unpaired surrogate"),
        ("bad.safetensors", b"1234", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_text_is_named(tmp_path, smollm2_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = run(tmp_path / name, "--out", tmp_path / "out", "--model", smollm2_path)
    assert result.exit_code == 2 and f"files: {tmp_path / name}" in result.output and message in result.output
    assert not (tmp_path / "out").exists()


def test_files_without_any_text_make_no_corpus(tmp_path, smollm2_path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text("")
    result = run(tmp_path / "a.txt", tmp_path / "b.jsonl", "--out", tmp_path / "out", "--model", smollm2_path)
    assert result.exit_code == 2 and "there is nothing in them" in result.output
    assert not (tmp_path / "out").exists()


def test_a_corpus_tells_whose_tokens_it_has(tmp_path, smollm2_path):
    (tmp_path / "a.txt").write_text("Once upon a time")
    out = tmp_path / "corpus.safetensors"
    assert run(tmp_path / "a.txt", "--out", out, "--model", smollm2_path).exit_code == 0
    check_corpus_tokenizer(out, load_tokenizer(smollm2_path))
    letters = SimpleNamespace(encode=lambda text, add_special_tokens: [*map(ord, text)])
    with pytest.raises(ValueError, match="of another tokenizer"):
        check_corpus_tokenizer(out, letters)


def test_a_folder_without_dialogues_is_named(tmp_path, smollm2_path):
    result = run(tmp_path, "--out", tmp_path / "out", "--model", smollm2_path)
    assert result.exit_code == 2 and "without dialogues" in result.output


def test_a_model_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(json.dumps("a"))
    result = run(tmp_path / "a.txt", "--out", tmp_path / "out", "--model", "random:tiny")
    assert result.exit_code == 2 and "model: " in result.output
