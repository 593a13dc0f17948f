"""The losses of block drafters, slot by slot."""

import json

import pytest
import torch

from specengine.drafters import load_drafter
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.transformer import load_transformer
from specengine.train.export import write_drafter
from specengine.train.objectives import block, block_families
from specengine.train.objectives.target_layers import shape_of
from specengine.train.warm_start import warm_start_weights
from tests.drafters.block_files import write
from tests.train import straight_line as straight
from tests.train.tiny import CONFIG, batch_for, randomised, target_weights

SHAPE = shape_of(CONFIG)
EPS = SHAPE.rms_norm_eps
BLOCK = 4
MASK = CONFIG.vocab_size - 1
FAMILIES = {
    "dflash": lambda **options: block_families.DFlashObjective(
        target_weights(), block.BlockOptions(block=BLOCK, layers=2, anchors=0, **options)
    ),
    "jetspec": lambda **options: block_families.JetSpecObjective(
        target_weights(), block_families.JetSpecOptions(block=BLOCK, layers=2, anchors=0, **options)
    ),
    "dspark": lambda **options: block_families.DSparkObjective(
        target_weights(), block_families.DSparkOptions(block=BLOCK, layers=2, anchors=0, markov=6, **options)
    ),
}


def made(family, **options):
    objective = randomised(FAMILIES[family](**options))
    objective.prepare(batch_for(objective))
    return objective


def projected(row, w, position):
    """Computes keys and values of a row: heads have a norm before they are rotated."""
    keys = [straight.rms(h, w("self_attn.k_norm.weight"), EPS) for h in heads(row, w, "k")]
    return [straight.turned(h, position, SHAPE.rope_theta) for h in keys], heads(row, w, "v")


def heads(row, w, name):
    return straight.heads(row, w(f"self_attn.{name}_proj.weight"), SHAPE.head_dim)


def slot_states(w, at_layers, embedded, row, causal):
    """Computes the normed states of the slots of a block. at_layers: [t + 1, ..].  embedded: of its slots."""
    context = [straight.rms(w("fc.weight") @ x.flatten().double(), w("hidden_norm.weight"), EPS) for x in at_layers]
    slots = [x.double() for x in embedded]
    for i in range(2):
        layer = w.of(f"layers.{i}.")
        seen = [projected(x, layer, position) for position, x in enumerate(context)]
        normed = [straight.rms(x, layer("input_layernorm.weight"), EPS) for x in slots]
        own = [projected(x, layer, row + 1 + slot) for slot, x in enumerate(normed)]
        found = []
        for slot, x in enumerate(slots):
            queries = [straight.rms(h, layer("self_attn.q_norm.weight"), EPS) for h in heads(normed[slot], layer, "q")]
            queries = [straight.turned(h, row + 1 + slot, SHAPE.rope_theta) for h in queries]
            visible = seen + (own[: slot + 1] if causal else own)
            y = x + layer("self_attn.o_proj.weight") @ straight.attend(queries, visible)
            found.append(y + straight.mlp(straight.rms(y, layer("post_attention_layernorm.weight"), EPS), layer))
        slots = found
    return [straight.rms(x, w("norm.weight"), EPS) for x in slots]


def guess_loss(objective, w, state, above, label, last):
    """Computes the loss of one guess: the token `above` it is read by the Markov head."""
    options, family = objective.options, objective.name
    logits = w("lm_head.weight") @ state
    if family == "dspark":
        bigram = w("markov_head.markov_w1.weight")[above]
        logits = logits + w("markov_head.markov_w2.weight") @ bigram
        confidence = (
            w("confidence_head.proj.weight")[0] @ torch.cat([state, bigram]) + w("confidence_head.proj.bias")[0]
        )
    truth = (objective.target.head.double() @ last.double()).softmax(0)
    ours = logits.log_softmax(0)
    distance = (ours.exp() - truth).abs().sum()
    loss = -options.text * ours[label] - options.soft * (truth * ours).sum() + options.distance * distance
    if family == "dspark":
        chance = torch.sigmoid(confidence)
        accepted = 1 - distance / 2
        loss = loss - options.confidence * (accepted * chance.log() + (1 - accepted) * (1 - chance).log())
    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_blocks_done_slot_by_slot(family):
    objective = made(family)
    given = batch_for(objective, lengths=(14, 8), wanted_from=(2, 4))
    given.wanted[0, 4] = False  # a token between two answers: no block goes on behind it
    loss, report = objective.loss(given)
    w = straight.Weights(objective.export()[1])  # the stored tensors must be the trained ones
    ids = objective.target.vocabulary.tolist()
    shift = 0 if family == "dspark" else 1  # whether the anchor's slot guesses
    levels = BLOCK - shift
    expected, rows = torch.zeros(levels, dtype=torch.float64), torch.zeros(levels)
    for b, length in enumerate(given.lengths.tolist()):
        for t in range(length):
            if not (t + 1 < length and given.wanted[b, t + 1]):
                continue
            slots = torch.tensor([given.tokens[b, t + 1], *[MASK] * (BLOCK - 1)])
            states = slot_states(
                w, given.at_layers[b, : t + 1], objective.target.embed(slots), t, causal=family == "jetspec"
            )
            for level in range(levels):
                above = t + 1 + level
                if above >= length or not given.wanted[b, above]:
                    break
                rows[level] += 1
                token = given.tokens[b, above + 1].item()
                if token in ids:
                    expected[level] += guess_loss(
                        objective,
                        w,
                        states[level + shift],
                        given.tokens[b, above],
                        ids.index(token),
                        given.last[b, above],
                    )
    decay = {"jetspec": 1.0}.get(family, torch.tensor(-1 / 4).exp().double())
    torch.testing.assert_close(report.loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        loss.double(), sum(decay**i * each for i, each in enumerate(expected)), rtol=1e-5, atol=0
    )
    assert report.rows.tolist() == rows.tolist()
    assert expected.gt(0).all()


@pytest.mark.parametrize(("family", "sees"), [("dflash", True), ("jetspec", False)])
def test_slots_of_jetspec_see_no_later_slot(family, sees):
    network = made(family).network
    given = batch_for(FAMILIES[family](), lengths=(9,), wanted_from=(2,))
    slots = torch.randn(1, BLOCK, CONFIG.hidden_size)
    changed = slots.clone()
    changed[:, 2] = 1.0
    before, after = (network(given.at_layers[0], x, torch.tensor([5])) for x in (slots, changed))
    assert (before[0, :2] != after[0, :2]).any().item() == sees
    assert (before[0, 3] != after[0, 3]).any()


def test_a_block_sees_no_later_context():
    network = made("dflash").network
    at_layers = batch_for(FAMILIES["dflash"](), lengths=(9,), wanted_from=(2,)).at_layers[0]
    changed = at_layers.clone()
    changed[6:] = 1.0
    slots, rows = torch.randn(2, BLOCK, CONFIG.hidden_size), torch.tensor([5, 6])
    before, after = (network(x, slots, rows) for x in (at_layers, changed))
    assert (before[0] == after[0]).all() and (before[1] != after[1]).any()


def test_random_blocks_stand_for_all():
    """The mean over draws of the scaled loss is the loss of all blocks; the other way round: draws differ."""
    few = made("jetspec")
    given = batch_for(few, lengths=(11, 9), wanted_from=(4, 3))
    whole = few.loss(given)[0].item()
    few.options = block_families.JetSpecOptions(block=BLOCK, layers=2, anchors=3)
    torch.manual_seed(0)
    drawn = torch.tensor([few.loss(given)[0].item() for _ in range(20)])
    assert drawn.std() > 0
    assert abs(drawn.mean().item() / whole - 1) < 4 * drawn.std().item() / whole / len(drawn) ** 0.5
    assert few.loss(given)[1].rows.max() <= 6 < whole


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoint_is_as_published(family):
    objective = made(family)
    config, tensors = objective.export()
    assert {tuple(tensors[f"layers.1.self_attn.{name}_norm.weight"].shape) for name in "qk"} == {(CONFIG.head_dim,)}
    assert tuple(tensors["fc.weight"].shape) == (CONFIG.hidden_size, 3 * CONFIG.hidden_size)
    assert {"hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"} < set(tensors)
    assert config["block_size"] == BLOCK and config["num_hidden_layers"] == 2
    layers = [layer - 1 for layer in objective.hidden_state_layers]
    if family == "dspark":
        assert config["target_layer_ids"] == layers and config["mask_token_id"] == MASK and config["markov_rank"] == 6
        assert tuple(tensors["markov_head.markov_w1.weight"].shape) == (CONFIG.vocab_size, 6)
        assert tuple(tensors["confidence_head.proj.weight"].shape) == (1, CONFIG.hidden_size + 6)
    else:
        own = {"mask_token_id": MASK, "target_layer_ids": layers}
        assert config["dflash_config"] == own | ({"causal_head": True} if family == "jetspec" else {})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafter_of_its_name_loads_the_checkpoint(family, tmp_path):
    objective = made(family)
    write(tmp_path, *objective.export())
    target = load_transformer(RandomCheckpoint(CONFIG), "float32", torch.device("cpu"))
    drafter = load_drafter(f"{family}:{tmp_path}", target)
    assert (
        drafter.hidden_state_layers == objective.hidden_state_layers
        and drafter.network.settings.levels == objective.levels
    )
    assert {mask.causal for mask in drafter.network.settings.masks} == {family == "jetspec"}
    assert drafter.network.head.estimates == (family == "dspark")


@pytest.mark.parametrize("options", [{"block": 1}, {"anchors": -1}, {"soft": -1.0}, {"start": "layer"}, {"layers": 0}])
def test_wrong_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: "):
        block.BlockOptions(**options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("key", "other"), [("mask_token_id", 3), ("target_layer_ids", [0, 1, 2])])
def test_a_run_starts_from_a_drafter_of_the_same_slots_and_layers_alone(family, key, other, tmp_path):
    first, second = made(family), FAMILIES[family]()
    second.prepare(batch_for(second, seed=1))
    write_drafter(tmp_path, *first.export(), "float32", "")
    second.network.load_state_dict(warm_start_weights(tmp_path, second, CONFIG))
    given = batch_for(first, lengths=(11, 8))
    torch.testing.assert_close(second.loss(given)[0], first.loss(given)[0], rtol=1e-4, atol=0)
    config = json.loads((tmp_path / "config.json").read_text())
    config.get("dflash_config", config)[key] = other
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"^start: .* has {key} "):
        warm_start_weights(tmp_path, second, CONFIG)
