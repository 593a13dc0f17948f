"""combine inside captured cycles: copies of the text beside a network's nodes, and what plain decoding says."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from specengine.drafters.combine.captured import CapturedPair
from specengine.drafters.prompt_lookup.drafter import PRIOR, Config
from tests.engine.device.prompts import GREEDY, PROMPTS, SAMPLED
from tests.engine.prefixes import SPECS
from tests.engines import ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
SEEN = [[3 + (step * i) % 317 for i in range(317)] for step in (7, 30)]  # after these, every token has occurred
NETWORKS = ["eagle3", "eagle3 backbone", "fasteagle", "medusa", "glide", "mtp", "dflash", "dspark", "domino chain"]


def with_copies(name, folders, nodes=8):
    parts = SPECS[name].format(**folders).replace(",", ";")
    return f"combine:prompt_lookup+{parts},nodes={nodes},adaptive=false"


def copied(text, levels):
    """The longest match's continuation, of equals the newest's."""
    places = [
        (next((n for n in range(min(place, 64)) if text[place - 1 - n] != text[-1 - n]), min(place, 64)), place)
        for place in range(1, len(text))
    ]
    length, place = max(places, default=(0, 0))
    following = text[place:]
    return [following[i % len(following)] for i in range(levels)] if length else []


def has_path(cycle, tokens):
    node = 0
    for token in tokens:
        children = [i for i, parent in enumerate(cycle.parents) if parent == node and cycle.tokens[i] == token]
        if not children:
            return False
        node = children[0]
    return True


def copies_in(outputs, levels, params):
    """In how many trees a whole copy is a path, and how many could have one."""
    found = possible = 0
    for prompt, output in zip(SEEN, outputs, strict=True):
        text = list(prompt)
        for cycle in output.trace:
            room = params.max_new_tokens - (len(text) - len(prompt)) - 1
            copy = copied(text, levels)
            possible += room >= levels and bool(copy)
            found += room >= levels and bool(copy) and has_path(cycle, copy)
            accepted = [cycle.tokens[node] for node in cycle.accepted]
            text += accepted + ([] if cycle.bonus is None else [cycle.bonus])
    return found, possible


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_have_copies_and_texts_are_those_of_plain_decoding(device_engine, folders, params):
    traced = dataclasses.replace(params, trace=True)
    expected = ids(device_engine("none", max_batch_size=1).generate(SEEN, params))
    engine = device_engine(with_copies("eagle3", folders, nodes=16), max_batch_size=2)
    assert engine.drafter.drafts_in_cycle
    outputs = engine.generate(SEEN, traced)
    assert ids(outputs) == expected
    found, possible = copies_in(outputs, 2, params)
    assert found >= 0.8 * possible >= 6
    alone = device_engine(SPECS["eagle3"].format(**folders), max_batch_size=2).generate(SEEN, traced)
    assert copies_in(alone, 2, params)[0] < 0.2 * possible


@pytest.mark.full
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_drafts_beside_copies(device_engine, folders, name):
    expected = ids(device_engine("none", max_batch_size=1).generate(PROMPTS, SAMPLED))
    engine = device_engine(with_copies(name, folders, nodes=6), max_batch_size=2)
    assert engine.drafter.drafts_in_cycle
    assert ids(engine.generate(PROMPTS, SAMPLED)) == expected


def copied_beside(backend, columns, text, known, levels, config):
    """The tokens, and which requests have any, where a network gives these columns."""
    batch = SimpleNamespace(history=text, limits=SimpleNamespace(active=torch.ones_like(known)))
    network = SimpleNamespace(draft_on_device=lambda batch: batch.extra_candidates(batch, columns, known, levels))
    copies = SimpleNamespace(acceptance=SimpleNamespace(rates=lambda: PRIOR), config=config)
    (tokens, *_), known = CapturedPair(copies, network, backend.device).draft(batch)
    return tokens, known


@pytest.mark.parametrize(("candidates", "levels", "copied"), [(9, 4, 4), (9, 100, 64), (2045, 4, 3), (2048, 4, 0)])
def test_copies_are_no_longer_than_there_is_room(cuda_backend, candidates, levels, copied):
    def put(values):
        return cuda_backend.put(torch.tensor(values, dtype=torch.int32))

    one, absent = put([1]), put([[7] + [-1] * (candidates - 1)])
    text = SimpleNamespace(tokens=put([[7, 8, 9, 7]]), length=put([4]))
    columns = absent, absent, absent.clamp(max=0), absent.float().clamp(max=0)
    tokens = copied_beside(cuda_backend, columns, text, one, levels, Config())[0]
    assert tokens.shape[1] == candidates + copied
    assert tokens[0, candidates:].tolist() == ([8, 9, 7] * 22)[:copied]


@pytest.mark.parametrize(("least", "copied"), [(1, [8, 9]), (2, [-1, -1])])
def test_a_copy_is_drafted_without_the_network_and_follows_no_shorter_match_than_its_part_allows(
    cuda_backend, least, copied
):
    def put(values):
        return cuda_backend.put(torch.tensor(values, dtype=torch.int32))

    one, root = put([1]), put([[7]])
    text = SimpleNamespace(tokens=put([[7, 8, 9, 7]]), length=put([4]))
    columns = root, -root.clamp(max=1), root * 0, (root * 0).float()
    tokens, known = copied_beside(cuda_backend, columns, text, one * 0, 2, Config(min_ngram=least))
    assert tokens.tolist() == [[7, *copied]] and known.tolist() == [copied[0] > 0]


def test_a_combination_in_captured_cycles_has_the_nodes_of_its_network_or_16(device_engine, folders):
    network = f"eagle3:{folders['eagle3']};nodes="
    for parts, nodes in ((f"{network}8", 16), (f"{network}24", 24), (f"suffix+{network}24", 16)):
        assert device_engine(f"combine:prompt_lookup+{parts}").drafter.max_nodes == nodes


def test_other_mixtures_draft_between_the_cycles(device_engine, folders):
    for parts in (
        "prompt_lookup+suffix",
        "prompt_lookup+suffix+" + SPECS["eagle3"].format(**folders).replace(",", ";"),
    ):
        engine = device_engine(f"combine:{parts},adaptive=false")
        assert not engine.drafter.drafts_in_cycle
