"""The drafter in the target's own checkpoint: what it drafts, and that no text changes."""

import dataclasses
import functools

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine._C import PAGE_SIZE
from specengine.drafters import best_drafter, load_drafter
from specengine.models.transformer import Transformer
from tests.drafters.eagle_bench import PROMPTS, Bench
from tests.drafters.mtp_files import LAYER, Reading, mtp_state, write_mtp
from tests.drafters.requests import path_to
from tests.engines import ids, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)
TARGETS = ("tiny-qwen3", "tiny-qwen2-moe", "tiny-qwen3-moe", "tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next")
COMMITTED = ([[1, 2, 3], [8], [9, 9], [30, 31]], [[6], [2, 8, 5], [7], [1]], [[5, 4, 3, 2], [1], [2], [3]])


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@functools.cache
def model_of(preset):
    """A random model whose final norm is not all ones: behind such a norm, a norm of the drafter could not tell it."""
    model = tiny_model(f"random:{preset}")
    norm = 1 + 0.5 * torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    return dataclasses.replace(model, target=with_weights(model.target, final_norm=norm))


def with_weights(target, **changes):
    return Transformer(dataclasses.replace(target.weights, **changes), target.device, target.ops)


def state_of(preset):
    torch.manual_seed(7)
    config = model_of(preset).config
    return mtp_state(config, config.moe)


def reading_of(preset, state):
    target = model_of(preset).target
    vocabulary = torch.arange(target.config.vocab_size, dtype=torch.int32)
    embedding = torch.empty(len(vocabulary), target.config.hidden_size)
    target.ops.layer.gather_rows(target.embedding, vocabulary, embedding)
    return Reading(target.config, state, embedding, target.logits(torch.eye(target.config.hidden_size)).T)


def bench_of(folder, preset, state, options):
    return Bench(f"mtp:{write_mtp(folder / 'mtp', state)}", PROMPTS, options, model_of(preset).target)


def check_chains(bench, reading, states=lambda hidden_states: hidden_states.last):
    """Every request's chain is the reading's, in every cycle."""
    for committed in (None, *COMMITTED):
        if committed:
            bench.commit(committed)
        for request, tree in zip(bench.requests, bench.drafter.draft(bench.requests).trees, strict=True):
            known = len(request.tokens) - 1
            if known:
                hidden_states = states(bench.hidden_states(request.tokens))[:known]
                assert tree.tokens[1:] == reading.chain(hidden_states, request.tokens[1:], len(tree.tokens) - 1)
                assert len(tree.tokens) == 5 and tree.parents == [-1, 0, 1, 2, 3]


CHAIN = "top_k=1,levels=4,adaptive=false"


@pytest.mark.quick(1)
@pytest.mark.parametrize("preset", TARGETS)
def test_it_drafts_the_chain_of_a_straight_line_reading(tmp_path, preset):
    state = state_of(preset)
    check_chains(bench_of(tmp_path, preset, state, CHAIN), reading_of(preset, state))


@pytest.mark.parametrize("beam", [0, 1])
@pytest.mark.parametrize("preset", TARGETS)
def test_every_node_is_among_the_likeliest_of_the_reading(tmp_path, preset, beam):
    state = state_of(preset)
    bench = bench_of(tmp_path, preset, state, f"top_k=3,levels=3,beam={beam},adaptive=false")
    reading = reading_of(preset, state)
    bench.commit(COMMITTED[0])
    for request, tree in zip(bench.requests, bench.drafter.draft(bench.requests).trees, strict=True):
        known = bench.hidden_states(request.tokens).last[: len(request.tokens) - 1]
        for node in {parent for parent in tree.parents if parent >= 0}:
            likeliest = reading.logits(known, [*request.tokens[1:], *path_to(tree, node)]).topk(3).indices.tolist()
            children = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == node]
            assert children == likeliest[: len(children)]
        assert len(set(tree.parents)) > 3


def swapped(state):
    first, second = state["mtp.fc.weight"].chunk(2, 1)
    return state | {"mtp.fc.weight": torch.cat([second, first], 1)}


WRONG = {
    "halves of fc swapped": (swapped, lambda hidden_states: hidden_states.last),
    "before the final norm": (dict, lambda hidden_states: hidden_states.at_layers[:, -1]),
    "norms of w": (lambda state: {name: x - 1 if x.ndim == 1 else x for name, x in state.items()}, None),
}


@pytest.mark.parametrize("change, states", WRONG.values(), ids=WRONG)
def test_another_convention_would_be_noticed(tmp_path, change, states):
    state = state_of("tiny-qwen3")
    bench = bench_of(tmp_path, "tiny-qwen3", state, CHAIN)
    with pytest.raises(AssertionError):
        check_chains(bench, reading_of("tiny-qwen3", change(state)), states or WRONG["halves of fc swapped"][1])


TREES = {
    "chain": CHAIN,
    "tree": "nodes=12,levels=3,top_k=3,adaptive=false",
    "wide": "top_k=40,levels=2,nodes=256,adaptive=false",
    "backbone": "levels=5,top_k=3,beam=1,adaptive=false",
    "what pays": "nodes=24,levels=4,top_k=4",
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3-next"])
def test_no_token_changes(tmp_path, preset, options, params, batch):
    spec = f"mtp:{write_mtp(tmp_path / 'mtp', state_of(preset))},{options}"
    engine = Engine(model_of(preset), drafter=spec, max_batch_size=batch)
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(Engine(model_of(preset), drafter="none").generate(PROMPTS, params))
    assert engine.cache.pages_in_use == 0
    if "adaptive=false" in options:
        assert all(output.stats.acceptance_by_depth for output in outputs)
    if "top_k=40" in options and preset == "tiny-qwen3":
        assert max(output.stats.tau for output in outputs) > 1
        assert max(output.stats.acceptance_by_depth[0] for output in outputs) > 0


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3.5"])
def test_a_prompt_that_begins_like_an_earlier_one_is_found_as_far_without_a_drafter(tmp_path, preset):
    shared = [(7 * i) % 90 for i in range(2 * PAGE_SIZE + 9)]
    prompts = [[*shared, i] for i in range(3)]
    own = f"mtp:{write_mtp(tmp_path / 'mtp', state_of(preset))}"
    for drafter in (f"{own},levels=2,top_k=3,adaptive=false", f"combine:prompt_lookup+{own};levels=2,adaptive=false"):
        engine, plain = Engine(model_of(preset), drafter=drafter), Engine(model_of(preset), drafter="none")
        for prompt in prompts:
            assert ids(engine.generate([prompt], GREEDY)) == ids(plain.generate([prompt], GREEDY))
        assert engine.cache.prefixes.hit == plain.cache.prefixes.hit == 2 * 2 * PAGE_SIZE


def test_without_a_path_it_is_the_one_in_the_target_s_own_checkpoint(tmp_path):
    state = state_of("tiny-qwen3")
    target = with_weights(model_of("tiny-qwen3").target, source=str(write_mtp(tmp_path / "own", state)))
    ours = load_drafter("mtp", target).network
    theirs = load_drafter(f"mtp:{tmp_path / 'own'}", model_of("tiny-qwen3").target).network
    assert torch.equal(ours.norms.out, 1 + state["mtp.norm.weight"]) and torch.equal(ours.norms.out, theirs.norms.out)
    assert ours.embedding is target.embedding and ours.head is target.head


def test_auto_is_copies_and_the_drafter_in_the_checkpoint(tmp_path):
    own = write_mtp(tmp_path / "own", state_of("tiny-qwen3"))
    target = with_weights(model_of("tiny-qwen3").target, source=str(own))
    assert best_drafter(model_of("tiny-qwen3").target).name == "prompt_lookup"
    assert (best_drafter(target).name, best_drafter(target).path) == ("combine", "prompt_lookup+mtp")
    assert [part.name for part in load_drafter("auto", target).parts] == ["prompt_lookup", "mtp"]


def test_it_is_a_part_of_combine(tmp_path):
    spec = f"combine:prompt_lookup+mtp:{write_mtp(tmp_path / 'mtp', state_of('tiny-qwen3'))};levels=3,adaptive=false"
    outputs = Engine(model_of("tiny-qwen3"), drafter=spec).generate(PROMPTS, GREEDY)
    assert ids(outputs) == ids(Engine(model_of("tiny-qwen3"), drafter="none").generate(PROMPTS, GREEDY))
    assert sum(output.stats.sources["mtp"].drafted for output in outputs) > 0


REFUSED = {
    "missing": ({"mtp.norm.weight": None}, "tensor 'mtp.norm.weight' is missing"),
    "size": ({"mtp.fc.weight": torch.zeros(64, 64)}, r"'mtp.fc.weight' has shape \(64, 64\), expected \(64, 128\)"),
    "layers": (
        {"mtp.layers.1.input_layernorm.weight": torch.zeros(64)},
        "'mtp.layers.1.input_layernorm.weight' is unexpected; expected one layer",
    ),
    "own head": ({"mtp.lm_head.weight": torch.zeros(320, 64)}, "'mtp.lm_head.weight' is unexpected; expected one"),
    "experts": ({f"{LAYER}.mlp.gate.weight": torch.zeros(8, 64)}, "'mtp.layers.0.mlp.gate.weight' is unexpected"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_its_tensor(tmp_path, changes, message):
    state = {name: tensor for name, tensor in (state_of("tiny-qwen3") | changes).items() if tensor is not None}
    with pytest.raises(ValueError, match=f"^drafter: mtp: .*{message}"):
        load_drafter(f"mtp:{write_mtp(tmp_path / 'mtp', state)}", model_of("tiny-qwen3").target)


def test_a_target_without_it_is_refused_and_told_what_was_expected(tmp_path):
    other = write_mtp(tmp_path / "other", {"model.norm.weight": torch.ones(64)})
    for spec, place in (("mtp", "random:tiny-llama"), (f"mtp:{other}", str(other))):
        with pytest.raises(
            ValueError, match=f"^drafter: mtp: {place} has no tensors mtp.* or .*; expected the folder or"
        ):
            load_drafter(spec, tiny_model().target)
    with pytest.raises(FileNotFoundError, match=r"^drafter: "):
        load_drafter("mtp:no/such/folder", tiny_model().target)
