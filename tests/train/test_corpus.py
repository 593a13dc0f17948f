"""The training dialogues, the held-out ones, and the target's states of both."""

import pytest
import torch
from safetensors import safe_open

from specengine.train.data.corpus import split, steps_of
from specengine.train.data.state_store import StateStore
from specengine.train.data.target_states import TargetPasses
from tests.train.runs import CONFIG, CPU, TARGET, corpus


def test_held_out_dialogues_are_the_same_every_time_and_never_trained_on(tmp_path):
    one, other = corpus(tmp_path), corpus(tmp_path)
    held_out = {d.number for d in one.held_out}
    assert held_out == {d.number for d in other.held_out}
    for epoch in (0, 1):
        numbers = [d.number for d in one.epoch(epoch)]
        assert not held_out & set(numbers)
        assert len(numbers) == len(set(numbers)) == 13
        assert numbers == [d.number for d in other.epoch(epoch)]
    assert one.epoch(0) != one.epoch(1)
    assert one.fingerprint == other.fingerprint


def test_steps_and_passes_hold_every_dialogue_once(tmp_path):
    made = corpus(tmp_path)
    groups = list(steps_of(made, 0, 40))
    assert [d for group in groups for d in group] == made.epoch(0)
    assert all(made.wanted_tokens(group) >= 40 for group in groups[:-1])
    for group in groups:
        parts = split(group, 70)
        assert sorted(d.number for part in parts for d in part) == sorted(d.number for d in group)
        assert all(len(part) * max(d.size for d in part) <= 70 for part in parts)


def test_too_few_dialogues_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data: 3 usable dialogues, expected more than the 3 held out"):
        corpus(tmp_path, count=3)


def test_a_batch_learns_answers_and_where_asked_questions(tmp_path):
    states = TargetPasses(TARGET, (2, 3, 4))
    for everything in (False, True):
        made = corpus(tmp_path, everything=everything)
        batch = made.batch(made.training[:4], lambda n, d: states.of(d.tokens), CPU)
        assert int(batch.wanted.sum()) == made.wanted_tokens(made.training[:4])
        for row, d in enumerate(made.training[:4]):
            assert batch.wanted[row].nonzero()[:, 0].tolist() == list(
                range(0 if everything else d.dialogue.answer - 1, d.size - 1)
            )
            assert batch.tokens[row, : d.size].tolist() == d.dialogue.tokens


def test_the_vocabulary_has_the_most_frequent_tokens_of_training_answers(tmp_path):
    made = corpus(tmp_path)
    counts = torch.zeros(CONFIG.vocab_size)
    for d in made.training:
        for token in d.dialogue.tokens[d.dialogue.answer :]:
            counts[token] += 1
    chosen = made.frequent_tokens(20)
    assert chosen.tolist() == sorted(chosen.tolist())
    others = torch.ones(CONFIG.vocab_size, dtype=torch.bool)
    others[chosen] = False
    assert counts[chosen].min() >= counts[others].max()


def test_states_do_not_depend_on_how_a_text_is_cut_into_passes(tmp_path):
    tokens = corpus(tmp_path).training[0].dialogue.tokens
    whole = TargetPasses(TARGET, (2, 3, 4), (5, 6)).of(tokens)
    parts = TargetPasses(TARGET, (2, 3, 4), (5, 6), rows=5).of(tokens)
    for name in ("greedy", "last", "at_layers", "keys", "values"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=1e-4)
    assert torch.equal(whole.greedy.long(), TARGET.logits(whole.last).argmax(-1))
    assert whole.keys.shape == (2, CONFIG.num_kv_heads, len(tokens), CONFIG.head_dim)
    assert whole.at_layers.shape == (len(tokens), 3, CONFIG.hidden_size)


@pytest.mark.parametrize("on_disk", [True, False])
def test_stored_states_are_made_once_and_rounded_to_float16(tmp_path, on_disk):
    made, calls = corpus(tmp_path), []
    states = TargetPasses(TARGET, (2, 3, 4))
    store = StateStore(lambda t: calls.append(1) or states.of(t), tmp_path / "s" if on_disk else None, {"of": "x"})
    one = made.training[0]
    first, second = store.states(one.number, one.dialogue), store.states(one.number, one.dialogue)
    assert len(calls) == 1
    assert torch.equal(first.at_layers, second.at_layers)
    torch.testing.assert_close(first.last.float(), states.of(one.dialogue.tokens).last, rtol=1e-3, atol=1e-3)


def test_files_of_states_keep_their_tensor_names(tmp_path):
    one = corpus(tmp_path).training[0]
    StateStore(TargetPasses(TARGET, (2, 3, 4), (5,)).of, tmp_path / "s", {}).states(one.number, one.dialogue)
    with safe_open(next((tmp_path / "s").iterdir()), "pt") as file:
        assert set(file.keys()) == {"greedy", "last", "tapped", "keys", "values"}


def test_states_of_another_text_or_target_are_refused(tmp_path):
    made, states = corpus(tmp_path), TargetPasses(TARGET, (2, 3, 4))
    one, other = made.training[:2]
    StateStore(states.of, tmp_path / "s", {"of": "x"}).states(one.number, one.dialogue)
    with pytest.raises(ValueError, match="was made with"):
        StateStore(states.of, tmp_path / "s", {"of": "y"}).states(one.number, one.dialogue)
    with pytest.raises(ValueError, match="was made with"):
        StateStore(states.of, tmp_path / "s", {"of": "x"}).states(one.number, other.dialogue)
