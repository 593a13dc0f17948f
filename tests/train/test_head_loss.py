"""The fused loss equals plain PyTorch's."""

import pytest
import torch

from specengine.train.objectives.head_loss import soft_cross_entropy


@pytest.mark.parametrize("rows", [1, 511, 1300])
def test_value_gradient_and_guesses_are_those_of_the_plain_loss(rows):
    torch.manual_seed(0)
    states, head = torch.randn(rows, 24, requires_grad=True), torch.randn(50, 24)
    target_probs, counted = torch.randn(rows, 50).softmax(-1), torch.rand(rows) < 0.7
    logits = states @ head.T
    plain = -((target_probs * logits.log_softmax(-1)).sum(-1) * counted).sum()
    (expected,) = torch.autograd.grad(3 * plain, states)
    total, ranked = soft_cross_entropy(states, head, target_probs, counted, 4)
    (gradient,) = torch.autograd.grad(3 * total, states)
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(ranked, logits.topk(4).indices)
    assert torch.equal(soft_cross_entropy(states, head, target_probs, counted, 1)[1][:, 0], logits.argmax(-1))


@pytest.mark.parametrize("rows", [3, 1300])
def test_a_head_that_is_trained_gets_its_gradient(rows):
    torch.manual_seed(0)
    states, head = torch.randn(rows, 24), torch.randn(50, 24, requires_grad=True)
    target_probs, counted = torch.randn(rows, 50).softmax(-1), torch.rand(rows) < 0.7
    plain = -((target_probs * (states @ head.T).log_softmax(-1)).sum(-1) * counted).sum()
    (expected,) = torch.autograd.grad(3 * plain, head)
    total, _ = soft_cross_entropy(states, head, target_probs, counted, 1)
    torch.testing.assert_close(torch.autograd.grad(3 * total, head)[0], expected, rtol=1e-4, atol=1e-4)


def test_no_rows_cost_nothing():
    states = torch.zeros(0, 8, requires_grad=True)
    total, ranked = soft_cross_entropy(states, torch.randn(5, 8), torch.zeros(0, 5), torch.zeros(0).bool(), 4)
    total.backward()
    assert (total.item(), ranked.shape, states.grad.shape) == (0.0, (0, 4), (0, 8))
