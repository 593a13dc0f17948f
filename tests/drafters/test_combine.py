"""Several drafters in one tree."""

import gc
import json
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from specengine import SamplingParams, drafters
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.policy import Source
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters import best_drafter, load_drafter, shipped
from specengine.drafters.combine.drafter import Combine, Config
from specengine.drafters.drafter import Drafter
from specengine.drafters.suffix.corpus_file import write_corpus
from specengine.types import CycleTrace
from tests.drafters import fasteagle_files
from tests.drafters.fasteagle_files import random_fasteagle
from tests.drafters.requests import sequence_of
from tests.drafters.steady import pass_time, steady
from tests.drafters.steered import steer
from tests.engines import GREEDY, SAMPLED, ids, tiny_engine, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:drafter")
COSTS = {1: 1.0, 2: 1.001, 64: 1.1}
PROMPTS = [[5, 9, 13, 5, 9, 13, 5, 9], [7], [3, 4, 3, 4, 3, 4, 3], list(range(40, 60)) * 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_fasteagle(tmp_path_factory.mktemp("combine"))[0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", ["", ",adaptive=false", ",nodes=3"])
@pytest.mark.parametrize("batch", [1, 4])
def test_no_token_changes(folder, params, options, batch):
    for parts in (f"prompt_lookup+fasteagle:{folder}", f"fasteagle:{folder};top_k=2+prompt_lookup;length=3"):
        engine = tiny_engine(f"combine:{parts}{options}", max_batch_size=batch)
        assert ids(engine.generate(PROMPTS, params)) == ids(tiny_engine("none").generate(PROMPTS, params))


@pytest.mark.parametrize("seed", range(3))
def test_no_token_changes_whatever_is_accepted(folder, seed):
    model = tiny_model()
    drafter = load_drafter(f"combine:prompt_lookup+fasteagle:{folder},adaptive=false", model.target)
    steered = steer(drafter, PROMPTS, GREEDY, seed, model)
    assert any(len(tree.tokens) > 10 for _, trees in steered.drafts for tree in trees)


def paths(cycle) -> set[tuple[int, ...]]:
    found = [()]
    for token, parent in zip(cycle.tokens[1:], cycle.parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def test_the_tree_holds_the_paths_of_every_part(folder):
    params = SamplingParams(max_new_tokens=20, trace=True)
    parts = (f"fasteagle:{folder};adaptive=false", "prompt_lookup;adaptive=false")
    alone = [tiny_engine(part.replace(";", ",")).generate(PROMPTS[0], params).trace[0] for part in parts]
    both = tiny_engine(f"combine:{'+'.join(parts)},nodes=64,adaptive=false").generate(PROMPTS[0], params).trace[0]
    assert all(map(paths, alone)) and paths(both) == set.union(*map(paths, alone))


def test_what_a_part_knows_of_a_sequence_goes_with_the_sequence(folder):
    drafter = load_drafter(f"combine:prompt_lookup+fasteagle:{folder}", tiny_model().target)
    request = sequence_of([5, 6, 5, 6])
    draft = drafter.draft([request])
    copies = weakref.ref(request.drafter_states[drafter.parts[0]])
    drafter.policy.observe(draft, [[5]])
    assert copies() is not None
    gc.disable()
    try:
        del request, draft
        assert copies() is None
    finally:
        gc.enable()


def test_a_batch_of_no_requests_has_no_trees(folder):
    assert load_drafter(f"combine:prompt_lookup+fasteagle:{folder}", tiny_model().target).draft([]).trees == []


class Part(Drafter, Source):
    """Proposes one tree, which takes some time, and counts how often it is asked."""

    name, learned, max_nodes = "part", (), 8

    def __init__(self, tree, drafter=None, seconds=0.0):
        self.tree, self.drafter, self.seconds, self.asked, self.skipped = tree, drafter, seconds, 0, 0

    def propose(self, requests, min_gain):
        self.asked += 1
        if self.drafter:
            pass_time(self.drafter, self.seconds)
        return [self.tree for _ in requests]

    def draft(self, requests): ...

    def skip(self, requests):
        self.skipped += 1


def combined(*trees, seconds=0.0, costs=COSTS):
    """A combination of parts that propose these trees."""
    drafter = Combine(Config(), "+".join(["prompt_lookup"] * len(trees)), tiny_model().target, CycleCosts(costs))
    drafter.parts[:] = drafter.policy.sources[:] = [Part(tree, drafter, seconds) for tree in trees]
    return steady(drafter)


def cycles(drafter, text, count=320, batch=1):
    """Runs `count` cycles, each with new requests; returns the sizes of their trees."""
    sizes = []
    for _ in range(count):
        requests = [sequence_of([1]) for _ in range(batch)]
        draft = drafter.draft(requests)
        drafter.observe(draft, [text[: tree.accepted(text) + 1] for tree in draft.trees], None)
        sizes += [len(tree.tokens) for tree in draft.trees]
    return sizes


@pytest.mark.parametrize("useful", [True, False])
def test_a_part_is_asked_where_it_pays(useful):
    sure = ScoredTree([1, 2, 3], [-1, 0, 1], [1.0, 0.9, 0.9])
    other = ScoredTree([1, 2, 3, 4], [-1, 0, 1, 2], [1.0, 0.9, 0.9, 0.9])
    drafter = combined(sure, other, seconds=0.3)
    sizes = cycles(drafter, [2, 3, 4 if useful else 9, 7, 7])
    first, second = drafter.parts
    assert first.asked >= 320 - 3 and second.asked + second.skipped == 320
    assert (second.asked >= 320 - 3 and sizes[-1] == 4) if useful else (second.asked < 60 and sizes[-1] == 3)


def test_nobody_is_asked_where_asking_takes_longer_than_it_can_save():
    tree = ScoredTree([1, 2], [-1, 0], [1.0, 0.5])
    drafter = combined(tree, tree, seconds=5.0)
    sizes = cycles(drafter, [2, 3, 4], batch=4)
    assert all(part.asked < 16 and part.asked + part.skipped == 320 for part in drafter.parts)
    assert sizes[-4:] == [1, 1, 1, 1]


class Fixed(Part):
    """Proposes one tree wherever the text is, and learns nothing."""

    reads_hidden_states = True

    def propose(self, requests, min_gain):
        return [self.tree.rooted(request.tokens[-1], request.draft_limit) for request in requests]


def test_every_part_is_counted_by_itself():
    model = tiny_model()
    plain = tiny_engine("none").generate(PROMPTS[0], GREEDY).token_ids
    often = max(set(plain), key=plain.count)
    parts = [
        Fixed(ScoredTree([0, often, often], [-1, 0, 1], [1.0, 0.5, 0.5])),
        Fixed(ScoredTree([0, 319, often, 318], [-1, 0, 0, 2], [1.0, 0.5, 0.5, 0.5])),
    ]
    drafter = Combine(Config(adaptive=False), "prompt_lookup+prompt_lookup:", model.target)
    drafter.parts[:], drafter.policy.sources[:], drafter._names = parts, parts, ["one", "two"]
    output = tiny_engine(drafter).generate(PROMPTS[0], replace(GREEDY, trace=True))
    assert output.token_ids == plain
    expected = {"one": [0, 0], "two": [0, 0]}
    for cycle in output.trace:
        taken = paths(CycleTrace(tuple(cycle.tokens), tuple(cycle.parents), (), None))
        on_path = {tuple(cycle.tokens[node] for node in cycle.accepted[: i + 1]) for i in range(len(cycle.accepted))}
        for name, own in (("one", {(often,), (often, often)}), ("two", {(319,), (often,), (often, 318)})):
            expected[name][0] += len(taken & own)
            expected[name][1] += len(on_path & own)
    found = {name: [stats.drafted, stats.accepted] for name, stats in output.stats.sources.items()}
    assert found == expected
    assert 0 < found["two"][1] <= found["one"][1] < found["one"][0] < found["two"][0]
    named = [name for cycle in output.trace for names in cycle.sources for name in names]
    assert {name: named.count(name) for name in found} == {name: accepted for name, (_, accepted) in found.items()}
    assert all(len(cycle.sources) == len(cycle.accepted) for cycle in output.trace if len(cycle.tokens) > 1)


def test_parts_of_one_kind_are_told_apart_and_other_drafters_have_none(folder):
    spec = f"combine:prompt_lookup;max_ngram=2+prompt_lookup+fasteagle:{folder},adaptive=false"
    stats = tiny_engine(spec).generate(PROMPTS[0], SAMPLED).stats
    assert set(stats.sources) == {"prompt_lookup,max_ngram=2", "prompt_lookup", "fasteagle"}
    assert all(0 <= source.accepted <= source.drafted > 0 for source in stats.sources.values())
    assert tiny_engine("prompt_lookup").generate(PROMPTS[0], SAMPLED).stats.sources == {}
    both = tiny_engine("combine:prompt_lookup+suffix,adaptive=false").generate(PROMPTS[0], SAMPLED).stats
    assert set(both.sources) == {"prompt_lookup", "suffix"}  # not those of suffix's own


@pytest.mark.parametrize(
    "path, message",
    [
        ("", "expected at least two drafters"),
        ("prompt_lookup", "expected at least two drafters"),
        ("prompt_lookup+", "expected at least two drafters"),
        ("prompt_lookup+none", "none gives its nodes no chances"),
        ("prompt_lookup+draft_model:self;layers=1", "draft_model draws its children"),
        ("prompt_lookup+nonsense", "expected auto or one of"),
        ("prompt_lookup;nodes=0+prompt_lookup", "nodes: expected an integer from 2"),
    ],
)
def test_parts_that_cannot_be_combined_are_named(path, message):
    with pytest.raises(ValueError, match=f"drafter: .*{message}"):
        tiny_engine(f"combine:{path}" if path else "combine")


@dataclass(frozen=True)
class NoOptions: ...


class Bare(Part):
    """Has no option `adaptive`."""

    name = "bare"
    config_type, takes_path = NoOptions, False

    def __init__(self, config, path, target):
        super().__init__(ScoredTree.root(0))


def test_a_part_need_not_have_the_option_adaptive(monkeypatch):
    known = drafters.drafter_kind
    monkeypatch.setattr(drafters, "drafter_kind", lambda name: Bare if name == "bare" else known(name))
    drafter = load_drafter(
        "combine:prompt_lookup;nodes=4+bare+prompt_lookup;adaptive=true,adaptive=false", tiny_model().target
    )
    assert [part.name for part in drafter.parts] == ["prompt_lookup", "bare", "prompt_lookup"]
    assert [part.config.adaptive for part in drafter.parts[::2]] == [False, True]


def test_parts_that_read_different_layers_are_refused(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(fasteagle_files, "TAPS", (0, 2))
    other, _ = random_fasteagle(tmp_path)
    with pytest.raises(ValueError, match="read different layers of the target"):
        tiny_engine(f"combine:fasteagle:{folder}+fasteagle:{other}")


def test_auto_is_copies_and_the_drafter_that_comes_with_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "CHECKPOINTS", tmp_path)
    assert tiny_engine("auto").drafter.name == "prompt_lookup"
    mark = shipped.fingerprint(tiny_model().target)
    random_fasteagle(tmp_path / "other" / "fasteagle", target_fingerprint="0" * 16)
    assert tiny_engine("auto").drafter.name == "prompt_lookup"
    random_fasteagle(tmp_path / "tiny" / "fasteagle", target_fingerprint=mark)
    engine = tiny_engine("auto,nodes=5")
    assert [part.name for part in engine.drafter.parts] == ["prompt_lookup", "fasteagle"]
    assert engine.drafter.max_nodes == 5
    write_corpus(tmp_path / "tiny/suffix/corpus.safetensors", [[1, 2, 3]])
    (tmp_path / "tiny/suffix/config.json").write_text(json.dumps({"target_fingerprint": mark}))
    assert [part.name for part in tiny_engine("auto").drafter.parts] == ["suffix", "fasteagle"]
    assert engine.generate(PROMPTS[0], GREEDY).token_ids == tiny_engine("none").generate(PROMPTS[0], GREEDY).token_ids


def test_auto_takes_no_path():
    with pytest.raises(ValueError, match=r"^drafter: auto takes no path, got 'auto:folder'"):
        tiny_engine("auto:folder")


def test_auto_on_a_device_is_what_drafts_inside_the_captured_cycle(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "CHECKPOINTS", tmp_path)
    known = tiny_model().target
    target = SimpleNamespace(ops=SimpleNamespace(on_device=True), final_norm=known.final_norm, weights=known.weights)
    random_fasteagle(tmp_path / "tiny" / "fasteagle", target_fingerprint=shipped.fingerprint(target))
    assert (best_drafter(target).name, best_drafter(target).path) == ("combine", "prompt_lookup+fasteagle")
