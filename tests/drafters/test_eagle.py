import pytest
import torch

from specengine import SamplingParams
from specengine.drafters import load_drafter
from specengine.tree import TreeBatch
from tests.drafters.eagle_files import Reading, layouts, write_drafter
from tests.drafters.test_draft_model import sequence_of
from tests.engines import tiny_model

CPU = torch.device("cpu")
LAYOUTS = layouts()
PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 40)), [4, 4]]
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)
OPTIONS = "nodes=24,levels=4,top_k=4,adaptive=false"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=LAYOUTS)
def layout(request, tmp_path):
    """Name of the drafter with its path, and what it should compute."""
    name, config, state = LAYOUTS[request.param]
    target = tiny_model().target
    embedding = torch.empty(320, 64)
    target.ops.layer.gather_rows(target.embedding, torch.arange(320, dtype=torch.int32), embedding)
    head = target.logits(torch.eye(64)).T
    folder = write_drafter(tmp_path / "draft", config, state)
    return f"{name}:{folder}", Reading(name, config, state, embedding, head)


class Bench:
    """A drafter driven by hand beside a target: what the engine would show it of every token."""

    def __init__(self, spec, prompts, options=OPTIONS):
        model = tiny_model().target
        self.drafter = load_drafter(f"{spec},{options}", model)
        self.target = model.with_taps(tuple(range(model.config.num_layers + 1)))
        self.cache = model.new_cache()
        self.drafter.attach(self.cache)
        self.sequences = [sequence_of(prompt) for prompt in prompts]
        for sequence in self.sequences:
            sequence.pages = self.cache.allocate(400)
            features, known = self.features(sequence.tokens), len(sequence.tokens) - 1
            for start in range(0, known, 16):
                self.drafter.observe_prompt(sequence, start, self.shown(features, slice(start, min(known, start + 16))))

    def features(self, tokens):
        """Of all positions, by a pass over the whole text."""
        pages = self.cache.allocate(len(tokens))
        rows = TreeBatch.chains([tokens], CPU)
        features = self.target.features(rows, self.cache, self.cache.batch([pages], [0]))
        self.cache.free(pages)
        return features

    def shown(self, features, rows):
        taps = features.tapped[:, list(self.drafter.taps)] if self.drafter.taps else None
        return type(features)(features.last[rows], None if taps is None else taps[rows])

    def commit(self, committed):
        """Every sequence goes on by its own tokens."""
        shown = []
        for sequence, tokens in zip(self.sequences, committed, strict=True):
            first = len(sequence.tokens) - 1
            sequence.commit(tokens[:-1], tokens[-1])
            shown.append(self.shown(self.features(sequence.tokens), slice(first, first + len(tokens))))
        parts = [torch.cat([each.last for each in shown])]
        parts.append(torch.cat([each.tapped for each in shown]) if self.drafter.taps else None)
        self.drafter.observe(self.sequences, committed, type(shown[0])(*parts))

    def grown(self):
        """The candidates of a draft, and the logits of every pass [rows, Vd]."""
        seen, logits = [], self.drafter.network.logits
        self.drafter.network.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
        ready = [sequence for sequence in self.sequences if self.drafter._state(sequence).pairs.count]
        grown, grow = [], self.drafter._grow
        self.drafter._grow = lambda *rest: grown.append(grow(*rest)) or grown[-1]
        self.drafter._draft(ready)
        self.drafter.network.logits, self.drafter._grow = logits, grow
        (trees,) = grown
        return ready, trees, seen


def candidate_path(trees, b, node):
    path = []
    while node >= 0:
        path.append(trees.tokens[b, node].item())
        node = trees.parents[b, node].item()
    return path[::-1]


def check_against(reading, bench):
    """Every distribution of a draft is the reading's, and so are the candidates made of it."""
    ready, trees, seen = bench.grown()
    k, checked = bench.drafter.config.top_k, 0
    for b, sequence in enumerate(ready):
        features = bench.features(sequence.tokens)
        known = len(sequence.tokens) - 1
        fused = reading.fused(features.last[:known], list(features.tapped[:known].unbind(1)))
        for level, logits in enumerate(seen):
            rows = logits.view(len(ready), -1, logits.shape[1])[b]
            first = trees.ends[level - 1] if level else 0
            for row, ours in enumerate(rows):
                children = slice(first + row * k, first + (row + 1) * k)
                (parent,) = set(trees.parents[b, children].tolist())
                path = candidate_path(trees, b, parent)
                theirs = reading.logits(fused, [*sequence.tokens[1:], *path])
                assert (ours - theirs).abs().max() / theirs.abs().max() < 1e-4
                best = theirs.sort(descending=True, stable=True)
                assert trees.tokens[b, children].tolist() == reading.tokens()[best.indices[:k]].tolist()
                before = trees.scores[b, parent] if level else 0.0
                assert torch.allclose(
                    (trees.scores[b, children] - before).double(), theirs.log_softmax(-1)[best.indices[:k]], atol=1e-4
                )
                checked += 1
    assert checked == len(ready) * (1 + 3 * k)


def test_every_distribution_is_that_of_the_published_architecture(layout):
    spec, reading = layout
    bench = Bench(spec, PROMPTS)
    check_against(reading, bench)
    bench.commit([[1, 2, 3], [8], [9, 9], [30, 31]])
    check_against(reading, bench)
    for committed in ([[6], [2, 8, 5], [7], [1]], [[5, 4, 3, 2], [1], [2], [3]]):
        bench.commit(committed)
        bench.drafter.draft(bench.sequences)
    bench.commit([[6], [2, 8, 5], [7], [1]])
    check_against(reading, bench)
