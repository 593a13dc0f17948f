"""EAGLE-1's network and loss, row by row."""

import pytest
import torch

from specengine.train.objectives.eagle import EagleObjective, Options
from specengine.train.objectives.target_layers import shape_of
from specengine.train.objectives.training_batch import ahead
from tests.train import straight_line as straight
from tests.train.tiny import CONFIG, batch_for, randomised, target_weights


@pytest.mark.parametrize("layers", [1, 2])
def test_the_loss_is_that_of_rows_done_one_by_one(layers):
    objective = randomised(EagleObjective(target_weights(), Options(layers=layers, noise=0)))
    given = batch_for(objective)
    loss, _ = objective.loss(given)
    w = straight.Weights(objective.export()[1])
    expected = 0.0
    for b, length in enumerate(given.lengths.tolist()):
        rows = [
            w("fc.weight")
            @ torch.cat([objective.target.embed(given.tokens[b, t + 1]).double(), given.last[b, t].double()])
            + w("fc.bias")
            for t in range(length - 1)
        ]
        for m in range(layers):
            rows = straight.layer(rows, w.of(f"layers.{m}."), shape_of(CONFIG))
        for t, state in enumerate(rows):
            if t + 1 >= length or not given.wanted[b, t + 1]:
                continue
            gap = (state - given.last[b, t + 1].double()).abs()
            expected += torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
            if given.greedy[b, t + 1].item() in objective.target.vocabulary.tolist():
                head = objective.target.head
                expected += 0.1 * straight.soft_entropy(given.last[b, t + 1], state, head, head)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_a_row_sees_nothing_later_than_itself():
    objective = randomised(EagleObjective(target_weights(), Options()))
    given = batch_for(objective)
    embedded = objective.target.embed(ahead(given.tokens, 1))
    before = objective.network(given.last, embedded)
    features, changed = given.last.clone(), embedded.clone()
    features[0, 7], changed[0, 7] = 1.0, 1.0
    after = objective.network(features, changed)
    assert (before[0, :7] == after[0, :7]).all() and (before[1] == after[1]).all()
    assert (before[0, 7:] != after[0, 7:]).any(-1).all()


def test_noise_is_as_wide_as_the_text_is_short_and_never_judged():
    objective = EagleObjective(target_weights(), Options(noise=0.2))
    given = batch_for(objective)
    noise = objective._noisy(given) - given.last
    for b, length in enumerate(given.lengths.tolist()):
        limit = 0.1 * 512 / length
        assert 0.95 * limit < noise[b].abs().max() <= limit * 1.001
    assert objective.loss(given)[0] != objective.loss(given)[0]
    with torch.no_grad():
        assert objective.loss(given)[0] == objective.loss(given)[0]


def test_the_checkpoint_is_as_published():
    json, tensors = EagleObjective(target_weights(None), Options()).export()
    assert "layers.0.input_layernorm.weight" not in tensors and "lm_head.weight" not in tensors
    assert tensors["fc.weight"].shape == (32, 64) and tensors["fc.bias"].shape == (32,)
    assert json["bias"] and json["num_hidden_layers"] == 1
    assert "fc.bias" not in EagleObjective(target_weights(None), Options(bias=False)).export()[1]
