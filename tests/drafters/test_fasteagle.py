import pytest
import torch
from safetensors.torch import save_file

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters import load_drafter, shipped
from specengine.drafters.fasteagle.drafter import Config, FastEagle
from specengine.drafters.fasteagle.network import FastEagleNetwork
from specengine.drafters.native import NativeDraft
from tests.drafters.draft_files import RandomWeights, dense_layer, norm
from tests.drafters.fasteagle_files import DRAFT_VOCAB, LEVELS, SHAPE, TAPS, TINY, random_fasteagle
from tests.engines import GREEDY, SAMPLED, ids, tiny_engine, tiny_model

PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 70)), [1, 2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_fasteagle(tmp_path_factory.mktemp("fasteagle"))[0]


def dense_chances(tensors, tokens: list[int], fields) -> torch.Tensor:
    """float32 [levels, Vd] of the published architecture and its options for a text whose last token is the root."""
    target = tiny_model().target.with_hidden_state_layers(TAPS)
    cache = target.new_cache()
    rows = TreeBatch.chains([tokens[:-1]], target.device)
    at_layers = target.hidden_states(rows, cache, cache.batch([cache.allocate(len(tokens))], [0])).at_layers
    embedding, head = (table.weights[0] for table in (target._embedding, target.head))
    embedded, unpacked = (torch.empty(TINY.vocab_size, TINY.hidden_size) for _ in range(2))
    everything = torch.arange(TINY.vocab_size, dtype=torch.int32)
    target.ops.layer.gather_rows(embedding, everything, embedded)
    target.ops.layer.gather_rows(head, everything, unpacked)
    eps = SHAPE.rms_norm_eps
    embedded, attended = embedded[tokens[1:]], None
    if fields.get("entry") == "concat":
        x = first = at_layers.flatten(1) @ tensors["fc_features.weight"].T
        halves = (("input", embedded), ("hidden", first))
        names = {"input": "layers.0.input_layernorm.weight", "hidden": "layers.0.hidden_norm.weight"}
        attended = torch.cat([norm(half, tensors[names[name]], eps) for name, half in halves], -1)
    else:
        normed = [norm(at_layers[:, i], tensors[f"fc_norm.{i}.weight"], eps) for i in range(len(TAPS))]
        fused = torch.cat(normed, -1) @ tensors["fc_features.weight"].T
        x = first = torch.cat([fused, embedded], -1) @ tensors["fc_input.weight"].T
    head = tensors.get("lm_head.weight", unpacked[torch.arange(DRAFT_VOCAB) + tensors["d2t"]])
    chances = []
    for i in range(LEVELS):
        x = dense_layer(tensors, f"layers.{i}", SHAPE, first if fields.get("parallel") else x, attended)
        attended = None
        output = norm(x[-1], tensors["norm.weight"], eps) if "norm.weight" in tensors else x[-1]
        logits = head @ output
        if i and "markov_w1.weight" in tensors:
            logits += tensors["markov_w2.weight"] @ tensors["markov_w1.weight"][chances[-1].argmax()]
        chances.append(logits.softmax(-1))
    return torch.stack(chances)


OPTIONS = {
    "cascade": {},
    "parallel": {"parallel": True},
    "norm": {"output_norm": True},
    "own head": {"own_head": True},
    "markov": {"markov": 16, "output_norm": True},
    "concat": {"entry": "concat"},
    "everything": {"entry": "concat", "markov": 8, "own_head": True, "output_norm": True},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("in_core", [True, False], ids=["core", "torch"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_draft_is_what_the_architecture_says_of_the_whole_text(tmp_path, monkeypatch, options, in_core):
    path, tensors = random_fasteagle(tmp_path, **options)
    engine = tiny_engine(f"fasteagle:{path},top_k=12,adaptive=false")
    assert (engine.drafter.native is None) == bool(options.get("parallel"))
    if not in_core:
        engine.drafter.native = None
    seen, grow = [], FastEagle.grow

    def recorded(self, requests, min_gain):
        trees = grow(self, requests, min_gain)
        seen.extend((list(s.tokens), tree) for s, tree in zip(requests, trees, strict=True))
        return trees

    monkeypatch.setattr(FastEagle, "grow", recorded)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert max(output.stats.tau for output in outputs) > 1  # partly accepted trees are among the cycles
    assert len(seen) > 100
    draft_ids = {int(token): i for i, token in enumerate(torch.arange(DRAFT_VOCAB) + tensors["d2t"])}
    for text, tree in seen[::7]:
        wanted = dense_chances(tensors, text, options)
        levels = (len(tree.tokens) - 1) // 12
        ids = torch.tensor([draft_ids[token] for token in tree.tokens[1:]]).view(levels, 12)
        chances = torch.tensor(tree.chances[1:]).view(levels, 12)
        assert (chances - wanted[:levels].gather(1, ids)).abs().max() <= 1e-4
        assert (chances - wanted[:levels].topk(12).values).abs().max() <= 1e-4


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options", ["top_k=1", "top_k=8", "top_k=8,reading=formula", "top_k=3,levels=2", "adaptive=true"]
)
@pytest.mark.parametrize("batch", [1, 4])
def test_no_token_changes(folder, params, options, batch):
    options = options if "adaptive" in options else f"{options},adaptive=false"
    engine = tiny_engine(f"fasteagle:{folder},{options}", max_batch_size=batch)
    assert ids(engine.generate(PROMPTS, params)) == ids(tiny_engine("none").generate(PROMPTS, params))


@pytest.mark.parametrize("reading, nodes", [("text", 1 + LEVELS * 10), ("formula", 1 + (LEVELS - 1) * 10)])
def test_the_tree_has_as_many_nodes_as_the_paper_says_in_either_reading(folder, reading, nodes):
    engine = tiny_engine(f"fasteagle:{folder},top_k=10,reading={reading},adaptive=false")
    params = SamplingParams(max_new_tokens=20, trace=True)
    trees = [cycle.tokens for cycle in engine.generate([5, 9, 13], params).trace]
    assert engine.drafter.max_nodes == nodes and max(len(tree) for tree in trees) == nodes


def test_the_tree_is_a_backbone_with_leaves(folder):
    engine = tiny_engine(f"fasteagle:{folder},top_k=3,adaptive=false")
    cycle = engine.generate([5, 9, 13], SamplingParams(max_new_tokens=20, trace=True)).trace[0]
    assert cycle.parents == (-1, 0, 0, 0, 1, 1, 1, 4, 4, 4)


def test_drafting_costs_one_call_of_the_core(folder, monkeypatch):
    engine, calls = tiny_engine(f"fasteagle:{folder},adaptive=false"), []
    draft = NativeDraft.__call__
    monkeypatch.setattr(NativeDraft, "__call__", lambda *rest: calls.append(1) or draft(*rest))
    monkeypatch.setattr(FastEagleNetwork, "draft", None)
    output = engine.generate([5, 9, 13], GREEDY)
    assert len(calls) == output.stats.cycles - 1  # the last cycle has no room for a draft


def test_drafts_go_on_past_the_length_the_drafter_was_trained_for(tmp_path):
    path, _ = random_fasteagle(tmp_path, max_position_embeddings=16)
    engine, prompt = tiny_engine(f"fasteagle:{path},adaptive=false"), list(range(1, 90))
    assert engine.generate(prompt, GREEDY).token_ids == tiny_engine("none").generate(prompt, GREEDY).token_ids


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_size": 48}, "it reads a target of hidden size 48, this one has"),
        ({"target_hidden_size": 48}, "it reads a target of hidden size 48, this one has"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 99]}, r"it reads the target's layers \(0, 2, 99\), expected"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, r"tensor 'fc_features.weight' has shape .*, expected"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_target_is_refused_by_name(tmp_path, fields, message):
    path, _ = random_fasteagle(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        tiny_engine(f"fasteagle:{path}")


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("layers.1.mlp.up_proj.weight", None, "is missing"),
        ("layers.1.mlp.up_proj.weight", torch.tensor(1.0), r"has shape \(\), expected"),
        ("fc_norm.1.weight", None, "is missing"),
        ("fc_norm.1.weight", torch.ones(3), r"has shape \(3,\), expected"),
        ("norm.weight", torch.ones(3), r"has shape \(3,\), expected"),
        ("layers.0.self_attn.q_proj.weight", torch.tensor(1, dtype=torch.int8), "needs columns in blocks of 32"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path, name, tensor, message):
    path, tensors = random_fasteagle(tmp_path)
    tensors = {key: value for key, value in (tensors | {name: tensor}).items() if value is not None}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"^drafter: .*'{name}'.*{message}"):
        tiny_engine(f"fasteagle:{path}")


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("lm_head.weight", torch.ones(DRAFT_VOCAB - 1, TINY.hidden_size), r"has shape \(39, 64\), expected \(40, 64\)"),
        ("markov_w1.weight", None, "is missing"),
        ("markov_w2.weight", torch.ones(DRAFT_VOCAB, 3), r"has shape \(40, 3\), expected \(40, 8\)"),
        ("layers.0.hidden_norm.weight", None, "is missing"),
        ("layers.0.self_attn.q_proj.weight", torch.ones(64, 64), r"has shape \(64, 64\), expected \(64, 128\)"),
    ],
)
def test_an_optional_part_that_is_incomplete_is_named(tmp_path, name, tensor, message):
    path, tensors = random_fasteagle(tmp_path, **OPTIONS["everything"])
    tensors = {key: value for key, value in (tensors | {name: tensor}).items() if value is not None}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'{name}'.*{message}"):
        tiny_engine(f"fasteagle:{path}")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"entry": "both"}, "'entry' must be 'sum' or 'concat', got 'both'"),
        ({"entry": "concat", "parallel": True}, "'entry' must not be 'concat' where the layers are parallel"),
    ],
)
def test_an_entry_that_does_not_exist_is_refused(tmp_path, fields, message):
    path, _ = random_fasteagle(tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        tiny_engine(f"fasteagle:{path}")


def test_a_vocabulary_beyond_the_targets_is_refused(tmp_path):
    weights = RandomWeights()
    path, tensors = random_fasteagle(tmp_path)
    tensors["d2t"] = tensors["d2t"] + TINY.vocab_size
    weights.tensors = tensors
    weights.save(path, SHAPE, eagle_aux_hidden_state_layer_ids=TAPS)
    with pytest.raises(ValueError, match=f"tensor 'd2t' leads to token .*, the target has {TINY.vocab_size}"):
        tiny_engine(f"fasteagle:{path}")


def test_a_bare_name_without_a_shipped_drafter_says_what_to_do():
    with pytest.raises(ValueError, match="no fasteagle drafter for this model comes with the package; give one as"):
        tiny_engine("fasteagle")


@pytest.mark.parametrize("options", [{"top_k": 0}, {"levels": -1}, {"reading": "both"}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Config(**options)


def test_more_levels_than_layers_are_refused(folder):
    with pytest.raises(ValueError, match=f"levels: expected an integer from 1 to {LEVELS}"):
        Engine(tiny_model(), drafter=f"fasteagle:{folder},levels={LEVELS + 1}")


@pytest.mark.parametrize("options", ["", ",levels=4"])
def test_random_drafters_have_the_published_sizes(options):
    engine = tiny_engine(f"fasteagle:random:tiny-llama,top_k=10,adaptive=false{options}")
    assert engine.drafter.network.levels == (4 if options else 7)
    assert engine.drafter.max_nodes == (41 if options else 71)
    assert engine.generate([5, 9, 13], GREEDY).token_ids == tiny_engine("none").generate([5, 9, 13], GREEDY).token_ids


def test_a_random_drafter_of_another_target_is_refused():
    with pytest.raises(ValueError, match="it reads a target of hidden size 4096, this one has 64"):
        tiny_engine("fasteagle:random:llama-3.1-8b")
    with pytest.raises(ValueError, match="unknown preset 'nonsense'"):
        tiny_engine("fasteagle:random:nonsense")


def test_a_drafter_whose_memory_goes_with_an_engine_serves_one(folder):
    model = tiny_model()
    drafter = load_drafter(f"fasteagle:{folder},adaptive=false", model.target)
    engine = Engine(model, drafter=drafter)
    running = engine.stream(list(range(3, 200)), GREEDY)
    next(running)
    with pytest.raises(ValueError, match=r"^drafter: fasteagle belongs to another engine; make one for each engine"):
        Engine(model, drafter=drafter)
    plain = Engine(model, drafter="none").generate(list(range(3, 200)), GREEDY)
    assert [event.output for event in running][-1].token_ids == plain.token_ids


def test_a_bare_name_finds_the_checkpoint_of_its_target_and_another_targets_makes_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "CHECKPOINTS", tmp_path)
    mark = shipped.fingerprint(tiny_model().target)
    random_fasteagle(tmp_path / "tiny" / "fasteagle", target_fingerprint=mark)
    assert tiny_engine("fasteagle").drafter.network.levels == LEVELS
    path, _ = random_fasteagle(tmp_path / "other", target_fingerprint="0" * 16)
    with pytest.warns(UserWarning, match="was trained for another model than this target"):
        tiny_engine(f"fasteagle:{path}")


def test_every_weight_of_a_pass_is_tuned_before_a_cycle_is_captured(folder):
    drafter = tiny_engine(f"fasteagle:{folder}").drafter
    assert len({id(product) for product in drafter.projections}) == 4 * LEVELS + 2  # fusion and head
