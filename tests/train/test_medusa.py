"""Medusa-1's heads and loss, row by row."""

import pytest
import torch

from specengine.train.objectives.medusa import MedusaObjective, Options
from tests.train import straight_line as straight
from tests.train.tiny import batch_for, randomised, target_weights


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("own_head", [True, False])
def test_the_loss_is_that_of_rows_done_one_by_one(soft, own_head):
    objective = randomised(MedusaObjective(target_weights(), Options(heads=3, soft=soft, own_head=own_head)))
    given = batch_for(objective)
    loss, report = objective.loss(given)
    w, vocabulary = straight.Weights(objective.export()[1]), objective.target.vocabulary.tolist()
    expected = torch.zeros(3, dtype=torch.float64)
    for b, length in enumerate(given.lengths.tolist()):
        for t in range(length):
            for i in range(3):
                x = given.last[b, t].double()
                y = w(f"{i}.0.linear.weight") @ x + w(f"{i}.0.linear.bias")
                state = x + y * torch.sigmoid(y)
                guessed = t + i + 1  # head i guesses the token after this position, t + i + 2
                if guessed >= length - 1 or not given.wanted[b, guessed]:
                    continue
                head = w(f"{i}.1.weight") if own_head else objective.target.head.double()
                label = (given.greedy[b, guessed] if soft else given.tokens[b, guessed + 1]).item()
                if label not in vocabulary:
                    continue
                if soft:
                    expected[i] += straight.soft_entropy(given.last[b, guessed], state, objective.target.head, head)
                else:
                    expected[i] -= (head @ state).log_softmax(0)[vocabulary.index(label)]
    torch.testing.assert_close(report.loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss.double(), expected @ torch.tensor([1, 0.8, 0.64]).double(), rtol=1e-5, atol=0)


def test_a_fresh_head_guesses_as_the_target():
    """W is zero, so training starts from the target's own guess of the token before."""
    for own_head in (True, False):
        objective = MedusaObjective(target_weights(), Options(own_head=own_head))
        x = torch.randn(5, 32)
        assert (objective.network[0][0](x) == x).all()
        if own_head:
            assert (objective.network[0](x) == objective.target.logits(x)).all()


def test_the_checkpoint_is_as_published():
    json, tensors = MedusaObjective(target_weights(None), Options(heads=2, own_head=True)).export()
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        f"{i}.{name}": shape
        for i in range(2)
        for name, shape in {"0.linear.weight": (32, 32), "0.linear.bias": (32,), "1.weight": (61, 32)}.items()
    }
    assert json["medusa_num_heads"] == 2
    assert "0.1.weight" not in MedusaObjective(target_weights(), Options()).export()[1]
