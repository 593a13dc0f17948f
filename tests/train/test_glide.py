"""GLIDE and draft models: networks and losses, row by row."""

import pytest
import torch

from specengine.models.checkpoint import RandomCheckpoint
from specengine.train.objectives.draft_model import DraftModelObjective
from specengine.train.objectives.draft_model import Options as DraftModelOptions
from specengine.train.objectives.glide import GlideObjective, Options, block_mask
from specengine.train.objectives.target_layers import shape_of
from tests.train import straight_line as straight
from tests.train.tiny import CONFIG, batch_for, randomised, target_weights

SHAPE = shape_of(CONFIG)


def may_attend(query, key, block):
    return key // block < query // block or (query < block and key <= query)


def expected_loss(objective, given, layers, block, soft):
    w, known, total = straight.Weights(objective.export()[1]), objective.target.vocabulary, 0.0
    vocabulary = list(range(CONFIG.vocab_size)) if known is None else known.tolist()
    head = w("lm_head.weight") if "lm_head.weight" in w else objective.target.head.double()
    table = w("model.embed_tokens.weight") if "model.embed_tokens.weight" in w else objective.target.embedding.double()
    for b, length in enumerate(given.lengths.tolist()):
        rows = [table[token] for token in given.tokens[b, :length].tolist()]
        for m in range(layers):
            own = w.of(f"model.layers.{m}.")

            def cross(t, x, m=m, own=own, b=b, length=length):
                if given.keys is None:
                    return x
                queries = straight.heads(x, own("cross_attn.q_proj.weight"), CONFIG.head_dim)
                queries = [straight.turned(q, t, CONFIG.rope.theta) for q in queries]
                seen = [
                    (list(given.keys[m, b, :, j].double()), list(given.values[m, b, :, j].double()))
                    for j in range(length)
                    if may_attend(t, j, block)
                ]
                return x + own("cross_attn.o_proj.weight") @ straight.attend(queries, seen)

            rows = straight.layer(rows, own, SHAPE, cross)
        for t, row in enumerate(rows):
            if not given.wanted[b, t]:
                continue
            label = (given.greedy[b, t] if soft else given.tokens[b, t + 1]).item()
            if label not in vocabulary:
                continue
            state = straight.rms(row, w("model.norm.weight"), SHAPE.rms_norm_eps)
            if soft:
                total += straight.soft_entropy(given.last[b, t], state, objective.target.head, head)
            else:
                total -= (head @ state).log_softmax(0)[vocabulary.index(label)]
    return total


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(layers=2, block=3, soft=False),
        Options(layers=2, cross=False),
        Options(own=True, block=4),
    ],
    ids=["published", "two layers", "without the cache", "own head"],
)
def test_the_loss_is_that_of_rows_done_one_by_one(options):
    objective = randomised(GlideObjective(target_weights(), options))
    given = batch_for(objective, lengths=(13, 9))
    loss, _ = objective.loss(given)
    expected = expected_loss(objective, given, options.layers, options.block, options.soft)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_a_draft_model_s_loss_is_that_of_rows_done_one_by_one():
    objective = randomised(DraftModelObjective(target_weights(), DraftModelOptions(layers=2)))
    given = batch_for(objective, lengths=(13, 9))
    expected = expected_loss(objective, given, 2, 1, True)
    torch.testing.assert_close(objective.loss(given)[0].double(), expected, rtol=1e-5, atol=0)


def test_the_block_mask_is_the_published_one():
    mask = block_mask(23, 5)
    assert mask.tolist() == [[may_attend(i, j, 5) for j in range(23)] for i in range(23)]
    assert mask.any(-1).all()


def states_of(objective, given):
    mask = block_mask(given.tokens.shape[1], objective.options.block)
    return objective.network(objective.target.embed(given.tokens), given.keys, given.values, mask)


def test_the_cache_of_a_row_s_own_block_does_not_matter_to_it():
    objective = randomised(GlideObjective(target_weights(), Options()))
    given = batch_for(objective, lengths=(18,), wanted_from=(3,))
    before = states_of(objective, given)
    given.keys[..., 12, :] += 1.0
    given.values[..., 12, :] += 1.0
    same = (states_of(objective, given) == before).all(-1)[0].tolist()
    assert same == [True] * 15 + [False] * 3  # rows 10 to 14 and position 12 are in one block


def test_a_row_sees_no_later_token():
    objective = randomised(GlideObjective(target_weights(), Options(layers=2)))
    given = batch_for(objective, lengths=(18,), wanted_from=(3,))
    before = states_of(objective, given)
    given.tokens[0, 8] = (given.tokens[0, 8] + 1) % CONFIG.vocab_size
    same = (states_of(objective, given) == before).all(-1)[0].tolist()
    assert same == [True] * 8 + [False] * 10


def test_without_the_cache_it_asks_for_none():
    with_cache, without = (GlideObjective(target_weights(), Options(layers=2, cross=cross)) for cross in (True, False))
    assert with_cache.kv_layers == (6, 7) and without.kv_layers == ()
    _, tensors = with_cache.export()
    rest = {name for name in tensors if "cross_attn" not in name}
    assert rest == set(without.export()[1]) and len(tensors) == len(rest) + 4


def test_it_begins_as_the_same_drafter_without_the_cache_and_learns_to_read_it():
    with_cache, without = (GlideObjective(target_weights(), Options(cross=cross)) for cross in (True, False))
    given = batch_for(with_cache, lengths=(13, 9))
    loss, _ = with_cache.loss(given)
    assert loss == without.loss(given)[0]
    loss.backward()
    cross = with_cache.network.model.layers[0].cross_attn
    assert cross.o_proj.weight.grad.abs().max() > 0 and cross.q_proj.weight.abs().max() > 0


def test_a_whole_draft_model_with_all_layers_is_the_target():
    """The checkpoint has the names and values of the target's tensors."""
    objective = DraftModelObjective(target_weights(None), DraftModelOptions(layers=8, whole=True))
    _, tensors = objective.export()
    checkpoint = RandomCheckpoint(CONFIG)
    assert set(tensors) == set(checkpoint.tensors)
    assert all((tensors[name] == checkpoint.read(name)).all() for name in tensors)


def test_a_draft_model_has_the_whole_vocabulary_of_the_target():
    for part in ((1, 2, 3), None):
        objective = DraftModelObjective(target_weights(part), DraftModelOptions())
        assert len(objective.target.head) == CONFIG.vocab_size and "d2t" not in objective.export()[1]


def test_guesses_further_on_are_counted_where_they_are_made():
    """The target drafts for itself, so every level agrees where the text is the target's."""
    objective = DraftModelObjective(target_weights(None), DraftModelOptions(layers=8))
    given = batch_for(objective)
    states = objective.network(objective.target.embed(given.tokens))
    own = objective.target.logits(states).argmax(-1)
    given = type(given)(**(vars(given) | {"greedy": own}))
    _, report = objective.loss(given)
    assert report.agreed.tolist() == report.rows.tolist() and report.acceptance[0] == 1
