"""The recipes refuse arguments that they cannot use, by name, before they write anything."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.train.data.dialogue_files import Dialogue, write_shard

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(name):
    """Imports a script that no package has."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def drafter(tmp_path):
    tokens = torch.tensor([2, 3, 5, 7, 11])
    folder = tmp_path / "drafter"
    folder.mkdir()
    known = torch.zeros(16, dtype=torch.bool)
    known[tokens] = True
    rows = {"lm_head.weight": tokens[:, None].float(), "d2t": tokens - torch.arange(5), "t2d": known}
    save_file(rows, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"draft_vocab_size": 5}))
    data = tmp_path / "data"
    data.mkdir()
    write_shard(data / "dialogues-00000.safetensors", [Dialogue([1, 3, 3, 3, 7, 7, 7, 5, 5, 9, 9, 9, 9], 1)], {})
    return folder


def test_a_drafter_keeps_the_most_frequent_of_its_tokens(drafter):
    recipe("fewer_tokens").main(drafter, drafter.parent / "data", 3)
    kept = load_file(drafter / "model.safetensors")
    assert kept["lm_head.weight"][:, 0].tolist() == [3, 5, 7]
    assert (kept["d2t"] + torch.arange(3)).tolist() == kept["t2d"].nonzero()[:, 0].tolist() == [3, 5, 7]
    assert json.loads((drafter / "config.json").read_text()) == {"draft_vocab_size": 3}


@pytest.mark.parametrize(
    ("count", "message"), [(0, "COUNT: expected 1 to 5"), (6, "COUNT: expected 1 to 5"), (4, "DATA: ")]
)
def test_a_number_of_tokens_that_are_not_there_is_refused(drafter, count, message):
    before = (drafter / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=message):
        recipe("fewer_tokens").main(drafter, drafter.parent / "data", count)
    assert (drafter / "model.safetensors").read_bytes() == before


def test_files_that_are_no_corpus_and_no_prompts_are_named(tmp_path):
    script = recipe("corpus_dialogues")
    save_file({"tokens": torch.tensor([3, -1], dtype=torch.int32)}, tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"CORPUS: .*corpus: expected a corpus of suffix whose tokens are uint16"):
        script.tokens_of(tmp_path / "corpus")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["One?"]}\n{"turn": 2}\n')
    with pytest.raises(ValueError, match=r"PROMPTS: .*prompts\.jsonl: line 2 is not"):
        list(script.questions_of(tmp_path / "prompts.jsonl"))


def test_a_question_whose_words_are_all_common_is_the_answer_s_of_none():
    questions = recipe("corpus_dialogues").Questions([[4, 5]])
    assert questions.of([4, 5], [4, 5, 6]) is None
