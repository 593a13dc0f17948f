"""EAGLE-3's training-time test, row by row and step by step."""

from dataclasses import replace

import pytest
import torch

from specengine.train.objectives.eagle3 import Eagle3Objective, Options
from specengine.train.objectives.target_layers import shape_of
from specengine.train.objectives.training_batch import ahead
from tests.train import straight_line as straight
from tests.train.tiny import CONFIG, batch, batch_for, randomised, target_weights

SHAPE = shape_of(CONFIG, input_size=2 * CONFIG.hidden_size)
LEVELS = 4


def made(**options):
    return randomised(Eagle3Objective(target_weights(), Options(levels=LEVELS, **options)))


def step_states(w, at_layers, embedded, steps):
    """Computes outputs [steps][T] of one dialogue. embedded: [T + steps] of tokens 1, 2, ..  w: exported tensors."""
    rows, eps = len(at_layers), SHAPE.rms_norm_eps
    x, mid = [], w.of("midlayer.")
    for states in at_layers:
        parts = list(states.double())
        if "fc_norm.0.weight" in w:
            parts = [straight.rms(part, w(f"fc_norm.{i}.weight"), eps) for i, part in enumerate(parts)]
        x.append(w("fc.weight") @ torch.cat(parts))
    caches, out = [[] for _ in range(rows)], []
    for step in range(steps):
        found = []
        for t in range(rows):
            token = straight.rms(embedded[t + step].double(), mid("input_layernorm.weight"), eps)
            row = torch.cat([token, straight.rms(x[t], mid("hidden_norm.weight"), eps)])
            q, k, v = straight.project(row, mid, SHAPE, t + step)
            caches[t].append((k, v))
            seen = [caches[earlier][0] for earlier in range(t)] + caches[t]
            y = x[t] + mid("self_attn.o_proj.weight") @ straight.attend(q, seen)
            found.append(y + straight.mlp(straight.rms(y, mid("post_attention_layernorm.weight"), eps), mid))
        x = found
        out.append(found)
    return out


@pytest.mark.parametrize("fc_norm", [False, True])
def test_the_loss_is_that_of_steps_done_one_by_one(fc_norm):
    objective = made(fc_norm=fc_norm)
    given = batch_for(objective, lengths=(14, 9))
    objective.prepare(given)
    loss, report = objective.loss(given)
    tensors = straight.Weights(objective.export()[1])  # the stored tensors must be the trained ones
    expected, rows = torch.zeros(LEVELS, dtype=torch.float64), torch.zeros(LEVELS)
    for b, length in enumerate(given.lengths.tolist()):
        embedded = objective.target.embed(torch.cat([given.tokens[b, 1:length], torch.zeros(LEVELS + 1).long()]))
        steps = step_states(tensors, given.at_layers[b, :length], embedded, LEVELS)
        for step, states in enumerate(steps):
            for t in range(length):
                guessed = t + 1 + step
                if guessed >= length or not given.wanted[b, guessed]:
                    continue
                rows[step] += 1
                if given.greedy[b, guessed].item() not in objective.target.vocabulary.tolist():
                    continue
                state = straight.rms(states[t], tensors("norm.weight"), SHAPE.rms_norm_eps)
                expected[step] += straight.soft_entropy(
                    given.last[b, guessed], state, objective.target.head, tensors("lm_head.weight")
                )
    torch.testing.assert_close(report.loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss.double(), sum(0.8**i * each for i, each in enumerate(expected)), rtol=1e-5, atol=0)
    assert report.rows.tolist() == rows.tolist()
    assert expected.gt(0).all()


def test_a_row_sees_nothing_later_than_itself():
    network = made().network
    given = batch(hidden_state_layers=3, lengths=(12,), wanted_from=(4,))
    embedded = target_weights().embed(ahead(given.tokens, 1))
    before = network(given.at_layers, embedded, LEVELS)
    at_layers, changed = given.at_layers.clone(), embedded.clone()
    at_layers[:, 7], changed[:, 7] = 1.0, -1.0
    after = network(at_layers, changed, LEVELS)
    for step, (old, new) in enumerate(zip(before, after, strict=True)):
        same = (old == new).all(-1)[0].tolist()
        first = 7 - step  # it reads the changed embedding as its own
        assert same[:first] == [True] * first and not any(same[first:8])


def test_the_step_keys_of_other_rows_are_not_seen():
    """Only the first step attends to other rows: their later embeddings change nothing, the row's own ones do."""
    network = made().network
    given = batch(hidden_state_layers=3, lengths=(12,), wanted_from=(4,))
    embedded = target_weights().embed(ahead(given.tokens, 1))
    longer = embedded.clone()
    longer[:, 9] = 1.0  # read at step 2 by row 7, at step 3 by row 6
    old, new = network(given.at_layers, embedded, 4), network(given.at_layers, longer, 4)
    assert (old[2][0, :7] == new[2][0, :7]).all() and (old[2][0, 7] != new[2][0, 7]).any()
    # row 8 has read it one step earlier; later steps of row 7 must not see that
    assert (old[3][0, :6] == new[3][0, :6]).all() and (old[3][0, 6] != new[3][0, 6]).any()


def test_rows_that_are_only_attended_change_nothing():
    network = made().network
    given = batch(hidden_state_layers=3)
    embedded = target_weights().embed(ahead(given.tokens, 1))
    whole = network(given.at_layers, embedded, LEVELS)
    part = network(given.at_layers, embedded, LEVELS, first=5)
    for all_rows, some in zip(whole, part, strict=True):
        torch.testing.assert_close(some, all_rows[:, 5:], rtol=1e-5, atol=1e-5)


def test_the_checkpoint_is_as_published():
    objective = made()
    json, tensors = objective.export()
    c, vocabulary = CONFIG, objective.target.vocabulary
    heads, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "fc.weight": (32, 96),
        "midlayer.self_attn.q_proj.weight": (heads, 64),
        "midlayer.self_attn.k_proj.weight": (keys, 64),
        "midlayer.self_attn.v_proj.weight": (keys, 64),
        "midlayer.self_attn.o_proj.weight": (32, heads),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (39, 32),
        "d2t": (39,),
        "t2d": (61,),
    }
    assert (tensors["d2t"] + torch.arange(39)).tolist() == vocabulary.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == vocabulary.tolist()
    assert json["architectures"] == ["LlamaForCausalLMEagle3"] and json["draft_vocab_size"] == 39


def test_fused_states_are_brought_to_one_scale_that_the_checkpoint_has_in_it():
    objective = made()
    given = batch_for(objective)
    objective.prepare(given)
    network = objective.network
    torch.testing.assert_close(network.tap_scale, torch.tensor([3.0, 61, 65]), rtol=0.2, atol=0)
    stored = given.at_layers.flatten(-2) @ objective.export()[1]["fc.weight"].T
    torch.testing.assert_close(stored, network.fused(given.at_layers), rtol=1e-4, atol=1e-5)
    assert 0.5 < stored[given.wanted].std() < 2


def test_it_starts_with_as_much_of_the_target_as_asked_for():
    made = {
        start: Eagle3Objective(target_weights(), Options(start=start)).network for start in ("layer", "head", "random")
    }
    read = target_weights().read
    layer = made["layer"].midlayer
    assert (layer.self_attn.q_proj.weight[:, :32] == 0).all()
    assert (layer.self_attn.q_proj.weight[:, 32:] == read("model.layers.7.self_attn.q_proj.weight")).all()
    assert (layer.mlp.up_proj.weight == read("model.layers.7.mlp.up_proj.weight")).all()
    for start, network in made.items():
        assert (network.lm_head.weight == target_weights().head).all().item() == (start != "random")
    assert (made["head"].midlayer.self_attn.q_proj.weight[:, :32] != 0).any()
    with pytest.raises(ValueError, match="start: "):
        Options(start="target")


def test_a_target_with_too_few_layers_is_refused():
    config = replace(CONFIG, num_layers=4)
    with pytest.raises(ValueError, match="target: the drafter reads three rising layers, 4 layers"):
        Eagle3Objective(target_weights(config=config), Options())
