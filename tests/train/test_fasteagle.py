"""FastEagle's network reads the inputs of a cycle, and its checkpoint equals the trained network."""

import pytest
import torch
from torch.nn import functional

from specengine.train.objectives.fasteagle import FastEagleNetwork, FastEagleOptions
from specengine.train.objectives.llama_layer import LayerShape
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch, ahead
from tests.train.runs import CONFIG, objective, target_weights

SHAPE = LayerShape(64, 160, 4, 2, 16, 1e-5, 10000.0)


def batch(lengths=(9, 6), seed=0) -> TrainingBatch:
    torch.manual_seed(seed)
    size, width = CONFIG.hidden_size, max(lengths)
    tokens = torch.randint(CONFIG.vocab_size, (len(lengths), width))
    lengths = torch.tensor(lengths)
    inside = torch.arange(width) < lengths[:, None]
    wanted = (torch.arange(width) >= 2) & (torch.arange(width) < lengths[:, None] - 1)
    last, at_layers = torch.randn(len(lengths), width, size), torch.randn(len(lengths), width, 3, size)
    return TrainingBatch(tokens * inside, lengths, wanted, tokens, last, at_layers * inside[..., None, None])


@pytest.mark.parametrize("parallel", [False, True])
def test_row_t_reads_hidden_states_up_to_t_and_tokens_up_to_t_plus_1(parallel):
    torch.manual_seed(0)
    network = FastEagleNetwork(SHAPE, 3, 3, parallel=parallel)
    at_layers, embedded = torch.randn(1, 8, 3, 64), torch.randn(1, 8, 64)
    before = network(at_layers, embedded)
    at_layers[:, 5:], embedded[:, 5:] = torch.randn(1, 3, 3, 64), torch.randn(1, 3, 64)
    for old, new in zip(before, network(at_layers, embedded), strict=True):
        assert torch.equal(old[:, :5], new[:, :5])
        assert not torch.isclose(old[:, 5], new[:, 5]).any(-1).all()


def test_a_level_reads_the_one_above_it_only_in_a_cascade():
    for parallel in (False, True):
        torch.manual_seed(0)
        network = FastEagleNetwork(SHAPE, 2, 3, parallel=parallel)
        x = torch.randn(1, 4, 3, 64), torch.randn(1, 4, 64)
        before = network(*x)[1]
        with torch.no_grad():
            network.layers[0].mlp.down_proj.weight.mul_(2)
        assert torch.equal(before, network(*x)[1]) == parallel


@pytest.mark.parametrize("feature_sum", [False, True])
def test_the_loss_is_the_published_one(feature_sum):
    options = FastEagleOptions(levels=3, start="random", feature_sum=feature_sum)
    made, x = objective(options=options), batch()
    total, report = made.loss(x)
    states = made.network(x.at_layers, made.target.embed(ahead(x.tokens, 1)) * made._scale)
    target_logits, expected = x.last @ made.target.head.T, 0.0
    for i, state in enumerate(states, start=1):
        for b, t in ahead(x.wanted, i).nonzero().tolist():
            ours, theirs = state[b, t], x.last[b, t + i]
            entropy = functional.cross_entropy(ours @ made.target.head.T, target_logits[b, t + i].softmax(-1))
            distance = functional.smooth_l1_loss(ours, theirs, reduction="sum" if feature_sum else "mean")
            expected += 0.9 ** (3 - i) * (0.1 * entropy + 1.0 * distance)
    torch.testing.assert_close(total, expected)
    assert report.rows.tolist() == [int(ahead(x.wanted, i).sum()) for i in (1, 2, 3)]


def test_the_loss_of_a_batch_is_the_sum_of_the_losses_of_its_dialogues():
    made, x = objective(), batch()
    alone = 0.0
    for b, length in enumerate(x.lengths.tolist()):
        cut = [f[b : b + 1, :length] for f in (x.tokens, x.wanted, x.greedy, x.last, x.at_layers)]
        alone += made.loss(TrainingBatch(cut[0], x.lengths[b : b + 1], *cut[1:]))[0]
    torch.testing.assert_close(made.loss(x)[0], alone)


def test_a_smaller_vocabulary_guesses_target_ids():
    vocabulary = torch.arange(1, CONFIG.vocab_size, 2)
    made = type(objective())(target_weights(vocabulary), FastEagleOptions(levels=2))
    with torch.no_grad():
        _, report = made.loss(batch())
    assert report.rows.sum() > 0
    config, tensors = made.export()
    assert config["draft_vocab_size"] == len(vocabulary)
    assert torch.equal(torch.arange(len(vocabulary)) + tensors["d2t"], vocabulary)


def test_tokens_outside_the_vocabulary_have_no_row():
    small = target_weights(torch.tensor([3, 5, 9]))
    assert small.draft_ids(torch.tensor([3, 4, 9, 10, 0])).tolist() == [0, -1, 2, -1, -1]
    assert small.target_ids(torch.tensor([2, 0])).tolist() == [9, 3]


def test_the_stored_weights_read_plain_embeddings():
    made, x = objective(), batch()
    _, tensors = made.export()
    loaded = FastEagleNetwork(SHAPE, 3, 3)
    loaded.load_state_dict(tensors)
    embedded = made.target.embed(ahead(x.tokens, 1))
    for ours, theirs in zip(
        made.network(x.at_layers, embedded * made._scale), loaded(x.at_layers, embedded), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_layers_begin_as_the_targets():
    for start, first in (("first", 0), ("last", 4)):
        made = objective(options=FastEagleOptions(levels=3, start=start))
        for i, layer in enumerate(made.network.layers):
            theirs = made.target.read(f"model.layers.{first + i}.mlp.up_proj.weight")
            assert torch.equal(layer.mlp.up_proj.weight, theirs)


@pytest.mark.parametrize("wrong", [{"levels": 0}, {"start": "middle"}, {"feature": -1.0}])
def test_wrong_options_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FastEagleOptions(**wrong)


def test_the_vocabulary_of_frozen_weights_may_be_all():
    whole: TargetWeights = target_weights()
    assert whole.vocabulary_tensors() == {}
    assert torch.equal(whole.draft_ids(torch.tensor([4, 2])), torch.tensor([4, 2]))
