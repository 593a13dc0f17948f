"""FastEagle's network reads the inputs of a cycle, and its checkpoint equals the trained network."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional

from specengine.train.export import write_drafter
from specengine.train.objectives.eagle3 import Eagle3Objective
from specengine.train.objectives.eagle3 import Options as Eagle3Options
from specengine.train.objectives.fasteagle import FastEagleObjective, FastEagleOptions
from specengine.train.objectives.fasteagle_network import FastEagleNetwork
from specengine.train.objectives.llama_layer import LayerShape
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch, ahead
from specengine.train.warm_start import warm_start_weights
from tests.train.runs import CONFIG, objective, target_weights

SHAPE = LayerShape(64, 160, 4, 2, 16, 1e-5, 10000.0)


CONCAT = replace(SHAPE, input_size=128)
ALL_PARTS = FastEagleOptions(levels=3, entry="concat", head="own", markov=4, start="random", feature=0.0)


def batch(lengths=(9, 6), seed=0) -> TrainingBatch:
    torch.manual_seed(seed)
    size, width = CONFIG.hidden_size, max(lengths)
    tokens = torch.randint(CONFIG.vocab_size, (len(lengths), width))
    lengths = torch.tensor(lengths)
    inside = torch.arange(width) < lengths[:, None]
    wanted = (torch.arange(width) >= 2) & (torch.arange(width) < lengths[:, None] - 1)
    last, at_layers = torch.randn(len(lengths), width, size), torch.randn(len(lengths), width, 3, size)
    return TrainingBatch(tokens * inside, lengths, wanted, tokens, last, at_layers * inside[..., None, None])


@pytest.mark.parametrize("kind", [{}, {"parallel": True}, {"concat": CONCAT}])
def test_row_t_reads_hidden_states_up_to_t_and_tokens_up_to_t_plus_1(kind):
    torch.manual_seed(0)
    network = FastEagleNetwork(SHAPE, 3, 3, **kind)
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


@pytest.mark.parametrize(
    "wrong",
    [
        *({"levels": 0}, {"start": "middle"}, {"feature": -1.0}, {"entry": "both"}, {"head": "none"}, {"markov": -1}),
        *({"parallel": True, "entry": "concat"}, {"start": "entry"}),
    ],
)
def test_wrong_options_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FastEagleOptions(**wrong)


def test_the_vocabulary_of_frozen_weights_may_be_all():
    whole: TargetWeights = target_weights()
    assert whole.vocabulary_tensors() == {}
    assert torch.equal(whole.draft_ids(torch.tensor([4, 2])), torch.tensor([4, 2]))


def test_a_level_gains_what_the_markov_head_says_of_the_token_above():
    """In training it is the token of the text, in evaluation the best guess of the level above."""
    torch.manual_seed(0)
    made, x = objective(options=replace(ALL_PARTS, decay=0.5)), batch()
    made.prepare(x)
    with torch.no_grad():
        for matrix in (made.network.markov_w2.weight, made.network.lm_head.weight):
            matrix.normal_()
    states = made.network(x.at_layers, made.target.embed(ahead(x.tokens, 1)))
    w1, w2 = made.network.markov_w1.weight, made.network.markov_w2.weight
    target_logits, expected = x.last @ made.target.head.T, {True: 0.0, False: 0.0}
    for b, t in product(*map(range, x.tokens.shape)):
        guess = None
        for i, state in enumerate(states, start=1):
            if t + i >= x.tokens.shape[1] or not x.wanted[b, t + i]:
                continue
            plain = made.network.lm_head(state[b, t])
            truth = target_logits[b, t + i].softmax(-1)
            for training, above in ((True, x.tokens[b, t + i]), (False, guess)):
                gain = 0 if i == 1 or above is None else w2 @ w1[above]
                expected[training] += 0.5 ** (3 - i) * functional.cross_entropy(plain + gain, truth)
            guess = (plain + gain).argmax()
    torch.testing.assert_close(made.loss(x)[0], 0.1 * expected[True])
    with torch.no_grad():
        torch.testing.assert_close(made.loss(x)[0], 0.1 * expected[False])
    assert not torch.isclose(expected[True], expected[False])


def test_the_markov_head_starts_without_effect():
    made, x = objective(options=replace(ALL_PARTS, start="first")), batch()
    plain = objective(options=replace(ALL_PARTS, start="first", markov=0))
    plain.network.load_state_dict(made.network.state_dict(), strict=False)
    for each in (made, plain):
        each.prepare(x)
    torch.testing.assert_close(made.loss(x)[0], plain.loss(x)[0])


def test_a_token_outside_the_vocabulary_adds_nothing_to_the_level_below():
    made = type(objective())(target_weights(torch.arange(0, CONFIG.vocab_size, 2)), ALL_PARTS)
    above = made._above(torch.tensor([4, 5]))
    assert torch.equal(above[0], made.network.markov_w1.weight[2]) and not above[1].any()


def test_the_first_level_starts_as_eagle3s():
    torch.manual_seed(0)
    theirs = Eagle3Objective(target_weights(), Eagle3Options(levels=2, start="random"))
    x = batch()
    for each in (theirs, made := objective(options=replace(ALL_PARTS, start="entry"))):
        each.prepare(x)
    json, tensors = theirs.export()
    names = made.translated(json, set(tensors))
    assert set(names.values()) == set(tensors)
    made.network.load_state_dict(made.adopted({ours: tensors[name] for ours, name in names.items()}))
    embedded = made.target.embed(ahead(x.tokens, 1))
    (expected,) = theirs.network(x.at_layers, embedded, 1)
    torch.testing.assert_close(made.network(x.at_layers, embedded)[0], theirs.network.norm(expected))
    torch.testing.assert_close(made.network.lm_head.weight, theirs.network.lm_head.weight)
    first, second = made.network.layers[:2]
    assert torch.equal(second.self_attn.q_proj.weight, first.self_attn.q_proj.weight[:, CONFIG.hidden_size :])
    assert torch.equal(second.input_layernorm.weight, first.hidden_norm.weight)


def test_a_plain_drafter_starts_one_with_more_parts_and_no_other_way_round():
    plain, more = (objective(options=FastEagleOptions(levels=2, head=head, markov=rank)) for head, rank in PARTS)
    names = set(plain.export()[1])
    assert set(more.translated({}, names)) == names
    assert set(plain.translated({}, set(more.export()[1]))) == names


PARTS = (("target", 0), ("own", 4))


def test_the_paper_s_drafter_is_the_default():
    config, tensors = FastEagleObjective(target_weights(), FastEagleOptions()).export()
    assert "entry" not in config and not any(name.startswith(("lm_head", "markov")) for name in tensors)
    config, tensors = FastEagleObjective(target_weights(), ALL_PARTS).export()
    assert config["entry"] == "concat" and {"lm_head.weight", "markov_w1.weight", "markov_w2.weight"} <= set(tensors)


def test_a_part_that_the_earlier_drafter_lacks_starts_fresh_in_another_vocabulary(tmp_path):
    even, low = torch.arange(0, CONFIG.vocab_size, 2), torch.arange(CONFIG.vocab_size // 2)
    plain = FastEagleObjective(target_weights(even), FastEagleOptions(levels=2))
    write_drafter(tmp_path, *plain.export(), "float32", "")
    more = FastEagleObjective(target_weights(low), FastEagleOptions(levels=2, head="own", markov=4))
    weights = warm_start_weights(tmp_path, more, CONFIG)
    assert torch.equal(weights["lm_head.weight"], more.target.head)
    torch.testing.assert_close(weights["fc_input.weight"], plain.network.fc_input.weight)
