"""Properties of the objective of every drafter."""

import pytest
import torch

from specengine.train.objectives import block, block_families, draft_model, eagle, eagle3, glide, medusa
from tests.train.tiny import batch_for, padded, randomised, target_weights

KINDS = {
    "eagle3": lambda f: eagle3.Eagle3Objective(f, eagle3.Options(levels=3)),
    "eagle3 with norms": lambda f: eagle3.Eagle3Objective(f, eagle3.Options(levels=3, fc_norm=True)),
    "eagle": lambda f: eagle.EagleObjective(f, eagle.Options(noise=0)),
    "eagle of two layers": lambda f: eagle.EagleObjective(f, eagle.Options(layers=2, noise=0)),
    "medusa": lambda f: medusa.MedusaObjective(f, medusa.Options(heads=3)),
    "medusa with heads": lambda f: medusa.MedusaObjective(f, medusa.Options(heads=3, own_head=True, soft=False)),
    "glide": lambda f: glide.GlideObjective(f, glide.Options(layers=2)),
    "glide on its own": lambda f: glide.GlideObjective(f, glide.Options(own=True, cross=False, soft=False)),
    "dflash": lambda f: block_families.DFlashObjective(f, block.BlockOptions(block=4, anchors=0)),
    "jetspec": lambda f: block_families.JetSpecObjective(f, block_families.JetSpecOptions(block=4, anchors=0)),
    "dspark": lambda f: block_families.DSparkObjective(f, block_families.DSparkOptions(block=3, anchors=0, markov=4)),
    "draft model": lambda f: draft_model.DraftModelObjective(f, draft_model.Options()),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=KINDS)
def objective(request):
    return KINDS[request.param](target_weights())


def test_padding_changes_no_loss(objective):
    randomised(objective)
    given = batch_for(objective)
    loss, report = objective.loss(given)
    longer, longer_report = objective.loss(padded(given, 5))
    torch.testing.assert_close(longer, loss, rtol=1e-5, atol=0)
    assert longer_report.rows.tolist() == report.rows.tolist()


def test_the_loss_of_a_batch_is_the_sum_of_the_losses_of_its_dialogues(objective):
    """Rows of different dialogues do not see each other, and sums are not means."""
    randomised(objective)
    both = batch_for(objective)
    whole, _ = objective.loss(both)
    parts = [objective.loss(_only(both, i))[0] for i in range(2)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=0)


def _only(given, index):
    def pick(name, x):
        if x is None:
            return None
        return x[:, index : index + 1] if name in ("keys", "values") else x[index : index + 1]

    return type(given)(**{name: pick(name, x) for name, x in vars(given).items()})


def test_all_that_is_trained_and_nothing_else_gets_a_gradient(objective):
    randomised(objective)
    loss, _ = objective.loss(batch_for(objective))
    loss.backward()
    for name, parameter in objective.network.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    shared = objective.target
    assert not shared.embedding.requires_grad and not shared.head.requires_grad


def test_evaluation_counts_the_same_loss(objective):
    """Training counts only the best guess, evaluation the best few; the loss is the same."""
    randomised(objective)
    given = batch_for(objective)
    loss, report = objective.loss(given)
    with torch.no_grad():
        quiet, seen = objective.loss(given)
    torch.testing.assert_close(quiet, loss.detach(), rtol=1e-6, atol=0)
    assert seen.agreed.tolist() == report.agreed.tolist()
    assert (seen.near >= seen.accepted).all() and (seen.rows > 0).all()


@pytest.mark.quick(3)
def test_training_on_one_batch_lowers_its_loss(objective):
    given = batch_for(objective)
    objective.prepare(given)
    optimizer = torch.optim.AdamW(objective.network.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss, _ = objective.loss(given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_tokens_outside_the_vocabulary_teach_nothing(objective):
    """They also raise no error in a batch of such tokens only."""
    given = batch_for(objective)
    if objective.target.vocabulary is None:
        pytest.skip("a draft model has them all")
    outside = torch.full_like(given.tokens, 1)  # no token of tiny.target_weights()'s vocabulary
    given = type(given)(**(vars(given) | {"tokens": outside, "greedy": outside}))
    loss, report = objective.loss(given)
    assert report.agreed.sum() == 0 and (report.rows > 0).all()
    if objective.name != "eagle":  # it also learns hidden states
        assert loss.item() == 0
