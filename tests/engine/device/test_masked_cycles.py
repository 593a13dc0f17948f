"""Constrained requests on the device: the host fills the masks within the cycle, which no graph runs then."""

import dataclasses

import numpy as np
import pytest
import torch

from specengine import SamplingParams
from specengine.draft_trees.token_masks import pack_masks
from specengine.draft_trees.tree import DraftTree
from specengine.engine.device import cycle_graphs
from specengine.engine.request import Request
from tests.cuda_standin.device import Device
from tests.cuda_standin.install import standing_in
from tests.engine.device.captured import captured_engine, model_on_the_standin
from tests.engine.device.prompts import LOOKUP, PROMPTS, SAMPLED, SHAPED, on_the_cpu
from tests.engine.prefixes import SPECS
from tests.engines import Oracle, ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
VOCAB = 320  # of tiny-llama
CONSTRAINED = 7  # a seed that marks the constrained requests


def allowed_after(tokens: list[int]) -> np.ndarray:
    """A grammar: which tokens may follow a text, bool [V]; about a third, by its last token and its length."""
    return (np.arange(VOCAB) * 7 + tokens[-1] + len(tokens)) % 3 == 0


class Grammar:
    """Fills masks by allowed_after(), as the constraint of a request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.filled = 0

    def fill(self, tree: DraftTree, rows: np.ndarray) -> None:
        self.filled += len(rows)
        paths: list[list[int]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append(self._request.tokens if parent < 0 else [*paths[parent], token])
        rows[:] = pack_masks(torch.tensor(np.stack([allowed_after(path) for path in paths]))).numpy()

    def advance(self, tokens: list[int]) -> None:
        """Does nothing: the request has the text."""


@pytest.fixture(autouse=True)
def grammars(monkeypatch) -> list[Grammar]:
    """Constrains the requests of seed CONSTRAINED."""
    made: list[Grammar] = []
    prepare = Request.__post_init__

    def post_init(request: Request) -> None:
        prepare(request)
        if request.params.seed == CONSTRAINED:
            request.constraint = Grammar(request)
            made.append(request.constraint)

    monkeypatch.setattr(Request, "__post_init__", post_init)
    return made


def params_of(shape: SamplingParams) -> list[SamplingParams]:
    """One of each prompt; the second and the last are unconstrained."""
    return [dataclasses.replace(shape, seed=seed) for seed in (CONSTRAINED, 1, CONSTRAINED, 2)]


def obeys(output) -> bool:
    text = [*output.prompt_token_ids, *output.token_ids]
    return all(allowed_after(text[:end])[text[end]] for end in range(len(output.prompt_token_ids), len(text)))


@pytest.mark.quick(2)
@pytest.mark.parametrize("shape", [SAMPLED, SHAPED, dataclasses.replace(SAMPLED, temperature=0.0)])
def test_a_constrained_text_obeys_and_is_that_of_plain_decoding(device_engine, grammars, shape):
    params = params_of(shape)
    plain = [
        device_engine("none", max_batch_size=1).generate(prompt, each)
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    assert [obeys(output) for output in plain] == [True, False, True, False]
    for drafter in (LOOKUP, Oracle([[*o.prompt_token_ids, *o.token_ids] for o in plain], VOCAB, nodes=9)):
        outputs = device_engine(drafter, max_batch_size=3).generate(PROMPTS, params)
        assert ids(outputs) == ids(plain)
    assert min(output.stats.tau for output in outputs) > 1.2, "an oracle is accepted under masks too"
    for number in (1, 3):
        assert plain[number].token_ids == on_the_cpu(params[number], prompts=[PROMPTS[number]])[0].token_ids


@pytest.mark.parametrize("rule", ["rejection", "traversal", "typical"])
def test_other_rules_obey_on_the_device(device_engine, rule):
    draft = "draft_model:self,layers=1,length=3"
    engine = device_engine(draft, rule=rule, max_batch_size=2)
    outputs = engine.generate(PROMPTS, params_of(SAMPLED))
    assert all(obeys(output) for output in outputs[::2]) and len(outputs[0].token_ids) == 8


def test_logprobs_of_constrained_requests_are_those_of_the_model(device_engine):
    params = dataclasses.replace(SAMPLED, seed=CONSTRAINED, logprobs=2)
    plain, drafted = (device_engine(d, max_batch_size=1).generate(PROMPTS[0], params) for d in ("none", LOOKUP))
    assert plain.logprobs == drafted.logprobs and len(plain.logprobs) == 8


def test_a_mask_that_allows_nothing_ends_the_request_by_an_error(device_engine, monkeypatch):
    monkeypatch.setattr(Grammar, "fill", lambda self, tree, rows: rows.fill(0))
    engine = device_engine(LOOKUP, max_batch_size=1)
    with pytest.raises(ValueError, match="its mask allows no token"):
        engine.generate(PROMPTS[0], dataclasses.replace(SAMPLED, seed=CONSTRAINED))


@pytest.mark.sim
@pytest.mark.parametrize("name", ["prompt_lookup", "eagle3"])
def test_captured_engines_serve_constrained_requests_between_others(simulated, folders, name, monkeypatch):
    """Graphs go on writing to the memory that they were captured with."""
    least_seconds = cycle_graphs._least_seconds
    monkeypatch.setattr(cycle_graphs, "_least_seconds", lambda run, device, **_: least_seconds(run, device, repeats=1))
    simulated.set_schedule(0)
    simulated.set_multiprocessors(4)
    prompts, free = [PROMPTS[0], PROMPTS[3]], dataclasses.replace(SAMPLED, seed=1)
    expected = ids(on_the_cpu(free, prompts=prompts))
    spec = "prompt_lookup,nodes=2,adaptive=false" if name == "prompt_lookup" else SPECS[name].format(**folders)
    with standing_in(Device(), monkeypatch, simulated):
        engine = captured_engine(model_on_the_standin(), spec, max_batch_size=2)
        graphs, eager = engine.core.runner.graphs, []
        run = graphs._run_cycle
        monkeypatch.setattr(graphs, "_run_cycle", lambda batch: (eager.append(batch), run(batch)))
        constrained = []
        for params in (free, [dataclasses.replace(SAMPLED, seed=CONSTRAINED), free], free):
            eager.clear()
            outputs = engine.generate(prompts, params)
            assert outputs[1].token_ids == expected[1]
            if params is free:
                assert ids(outputs) == expected and not eager
            else:
                assert obeys(outputs[0]) and eager
                constrained.append(outputs[0].token_ids)
    assert constrained[0] != expected[0]
