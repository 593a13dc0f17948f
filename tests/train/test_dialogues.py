"""Training data that the target writes itself, on a real model."""

import json

import pytest

from specengine.tensor_parallel.loading import load_model
from specengine.train.data.dialogue_files import read_dialogues
from specengine.train.data.dialogues import DialogueConfig, read_questions, write_dialogues

pytestmark = pytest.mark.model
CONFIG = DialogueConfig(dialogues=2, answer_tokens=12)
TURNS = [["What is tea?", "Why?"], ["Name a colour."], ["Count to three."]]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_model(smollm2_path)


@pytest.fixture
def questions(tmp_path):
    lines = [{"turns": TURNS[0]}, {"prompt": TURNS[1][0]}, {"turns": TURNS[2]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return read_questions(tmp_path / "prompts.jsonl")


def test_every_turn_is_asked_and_answered(tmp_path, smollm2, questions):
    assert questions == TURNS
    shards = write_dialogues(smollm2, tmp_path / "data", 10**9, CONFIG, questions=questions)
    assert len(shards) == 2
    made = [d for path in shards for d in read_dialogues(path)]
    chat = smollm2.tokenizer
    for turns, dialogue in zip(TURNS, made, strict=True):
        text = chat.decode(dialogue.tokens[: dialogue.answer])
        assert turns[0] in text and not any(turn in text for turn in turns[1:])
        follow = chat.decode(dialogue.tokens[dialogue.answer :])
        assert all(turn in follow for turn in turns[1:])
        prompt = [{"role": "user", "content": turns[0]}]
        assert dialogue.tokens[: dialogue.answer] == chat.encode(chat.render_chat(prompt), add_special_tokens=False)


def test_shards_that_are_there_are_kept_and_those_of_other_questions_refused(tmp_path, smollm2, questions):
    shards = write_dialogues(smollm2, tmp_path / "data", 10**9, CONFIG, questions=questions)
    first, second = shards[0].read_bytes(), list(read_dialogues(shards[1]))
    shards[1].unlink()
    told = []
    again = write_dialogues(smollm2, tmp_path / "data", 10**9, CONFIG, questions=questions, advance=told.append)
    assert again == shards and len(told) == 2
    assert shards[0].read_bytes() == first and list(read_dialogues(shards[1])) == second
    with pytest.raises(ValueError, match="was made with"):
        write_dialogues(smollm2, tmp_path / "data", 10**9, CONFIG, questions=questions[:2])
