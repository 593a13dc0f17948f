"""Captured cycles whose width changes: those of width 1 draft nothing, and later drafts miss none of their tokens."""

import dataclasses
import itertools
from collections import Counter

import pytest

from specengine.drafters import backlog
from specengine.drafters.backlog import Backlog
from specengine.engine.device.cycle_graphs import CycleGraphs
from tests.drafters import eagle_files, fasteagle_files, glide_files, medusa_files
from tests.engine.device.prompts import GREEDY, PROMPTS, SAMPLED, on_the_cpu
from tests.engines import ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
LAYOUTS = eagle_files.layouts()
ALL_CANDIDATES = 32  # as many nodes as the networks below and a copy have candidates, or more
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}


def eagle(layout, options):
    kind, config, state = LAYOUTS[layout]
    return lambda folder: f"{kind}:{eagle_files.write_drafter(folder, config, state)},{options}"


def medusa(folder):
    return f"medusa:{medusa_files.write(folder, medusa_files.heads_state(vocab=0))},nodes=6"


def glide(folder):
    config = {**glide_files.JSON, "num_hidden_layers": 1}
    return f"glide:{glide_files.write(folder, glide_files.glide_state(config), config)},length=2"


MAKERS = {
    "eagle3": eagle("two layers", "top_k=3,levels=2,beam=2,nodes=6"),
    "layers out of order": eagle("layers by their outputs", "top_k=2,levels=2,beam=1,nodes=4"),
    "fasteagle": lambda folder: f"fasteagle:{fasteagle_files.random_fasteagle(folder)[0]},top_k=2",
    "medusa": medusa,
    "glide": glide,
}

CASES = [(name, "sampled" if name == "eagle3" else "greedy") for name in MAKERS]


def drafts(output):
    """The tokens of each cycle's tree, by the length of the text before it."""
    lengths = itertools.accumulate((len(cycle.accepted) + 1 for cycle in output.trace), initial=0)
    return {length: sorted(cycle.tokens) for length, cycle in zip(lengths, output.trace, strict=False)}


def drafts_of_both(outputs, expected):
    """Lengths of text behind which both drafted, and the drafts of both."""
    for ours, theirs in zip(map(drafts, outputs), map(drafts, expected), strict=True):
        for length in ours.keys() & theirs.keys():
            yield length, ours[length], theirs[length]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name, params", CASES)
def test_a_draft_behind_plain_cycles_is_the_draft_behind_drafts(device_engine, tmp_path, monkeypatch, name, params):
    monkeypatch.setattr(backlog, "PLAIN_CYCLES", 2)  # catch-ups come early, before plain cycles too
    spec = MAKERS[name](tmp_path / "draft")
    traced = dataclasses.replace(PARAMS[params], max_new_tokens=12, trace=True)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    expected = on_the_cpu(traced, drafter=f"{spec},adaptive=false", prompts=prompts)
    engine = device_engine(spec, max_batch_size=2)
    widest = engine.drafter.max_nodes
    widths = itertools.cycle([1, 1, widest, *[1] * 6, widest, 1, 1, 2])  # a catch-up before a plain cycle, and a draft
    monkeypatch.setattr(CycleGraphs, "choose", lambda graphs, size: next(widths))
    outputs = engine.generate(prompts, traced)
    assert ids(outputs) == ids(expected)
    compared = 0
    for length, ours, theirs in drafts_of_both(outputs, expected):
        if len(ours) > 2:
            compared += 1
            assert ours == theirs, length
    assert compared > 2


@pytest.mark.parametrize("name", ["eagle3", "glide"])
def test_a_network_beside_copies_drafts_what_it_drafts_alone(device_engine, tmp_path, monkeypatch, name):
    monkeypatch.setattr(backlog, "PLAIN_CYCLES", 2)
    network = MAKERS[name](tmp_path / "draft")
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    traced = [dataclasses.replace(GREEDY, max_new_tokens=count, trace=True) for count in (5, 20, 4)]
    expected = on_the_cpu(traced, drafter=f"{network},adaptive=false", prompts=prompts)
    combined = f"combine:prompt_lookup+{network.replace(',', ';')},nodes={ALL_CANDIDATES}"
    engine = device_engine(combined, max_batch_size=2)  # the longest answer moves to the first slot
    assert engine.drafter.device_rows == engine.drafter.parts[1].device_rows > 0  # memory is planned with them
    widths = itertools.cycle([1, 1, ALL_CANDIDATES, *[1] * 6, ALL_CANDIDATES, ALL_CANDIDATES])
    monkeypatch.setattr(CycleGraphs, "choose", lambda graphs, size: next(widths))
    outputs = engine.generate(prompts, traced)
    assert ids(outputs) == ids(expected)
    compared = 0
    for length, ours, theirs in drafts_of_both(outputs, expected):
        if len(ours) > 1:
            compared += len(theirs) > 1
            assert not Counter(theirs) - Counter(ours), length
    assert compared > 2


def test_a_backlog_is_never_larger_than_what_a_draft_reads_or_has_room():
    for widths in itertools.product((1, 2, 5), repeat=5):
        counted, unread = Backlog(4, 5), 1
        counted.waiting = unread
        for width in [*widths, *[1] * 40, *widths]:
            if counted.is_late(width):
                unread = 1
            assert unread <= (counted.most if width > 1 else counted.room - 1)
            unread = unread + 1 if width == 1 else min(1 + width, counted.most)
            assert unread <= counted.waiting
