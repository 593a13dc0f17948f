"""The drafters that come with the package, on the model they were trained for."""

import json

import pytest

from specengine import Engine, SamplingParams
from specengine.cli.models import embedded_models
from specengine.hub.embedded_models import CHECKPOINTS
from specengine.tensor_parallel.loading import load_model
from tests.data.questions import QUESTIONS, chats
from tests.engines import ids
from tests.selection import wide

pytestmark = pytest.mark.model
TRAINED = ("fasteagle", "eagle3", "medusa", "glide", "draft-model")
DRAFTERS = (*TRAINED, "suffix")
PROMPTS = chats(QUESTIONS[::8])
TREES = {
    "fasteagle": ("top_k=1,adaptive=false", "top_k=10,adaptive=false", ""),
    "eagle3": (
        "top_k=1,levels=5,adaptive=false",
        "nodes=32,levels=6,adaptive=false",
        "beam=1,top_k=4,levels=5,adaptive=false",
        "",
    ),
    "medusa": ("nodes=8,adaptive=false", "adaptive=false", ""),
    "glide": ("cape=false,adaptive=false", "adaptive=false", "cross=false", ""),
    "draft-model": ("length=3,adaptive=false", "tree=3x2x1,adaptive=false", ""),
    "suffix": ("adaptive=false", "remember=1000", ""),
    "lookahead": ("adaptive=false,warm=true,window=4,ngram=4,guesses=4", ""),
    "ouroboros": ("adaptive=false,window=4,ngram=4,length=3", ""),
    "auto": ("adaptive=false", ""),
}
CASES = [row for name in TREES for row in wide((name, options) for options in TREES[name])]


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model(smollm2_path, device="cpu")


@pytest.fixture(scope="module")
def plain(model):
    return {}


GREEDY, SAMPLED = SamplingParams(max_new_tokens=24), SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "batch, params",
    [
        pytest.param(1, GREEDY, id="1-greedy"),
        pytest.param(4, SAMPLED, id="4-sampled"),
        pytest.param(1, SAMPLED, id="1-sampled", marks=pytest.mark.full),
        pytest.param(4, GREEDY, id="4-greedy", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("name, options", CASES)
def test_no_token_changes(model, plain, name, options, batch, params):
    key = params.temperature
    if key not in plain:
        plain[key] = ids(Engine(model, drafter="none", max_batch_size=4).generate(PROMPTS, params))
    spec = f"{name},{options}" if options else name
    outputs = Engine(model, drafter=spec, max_batch_size=batch).generate(PROMPTS, params)
    assert ids(outputs) == plain[key]
    if "adaptive=false" in options:  # the others may find that nothing pays
        assert sum(output.stats.cycles for output in outputs) < sum(map(len, plain[key]))


@pytest.mark.full
@pytest.mark.parametrize("name", wide(DRAFTERS))
def test_it_was_trained_for_this_model(model, name):
    params = SamplingParams(max_new_tokens=96, ignore_eos=True)
    tokens = cycles = 0
    for output in Engine(model, drafter=f"{name},{TREES[name][0]}").generate(PROMPTS, params):
        tokens, cycles = tokens + len(output.token_ids), cycles + output.stats.cycles
    assert tokens / cycles > 1.25  # weights that do not fit are hardly ever right: 1.0


@pytest.mark.full
def test_the_corpus_is_of_what_this_model_says(model):
    params = SamplingParams(max_new_tokens=96, ignore_eos=True)
    cycles = {}
    for spec in ("suffix,adaptive=false", "suffix,corpus=false,adaptive=false"):
        cycles[spec] = sum(output.stats.cycles for output in Engine(model, drafter=spec).generate(PROMPTS, params))
    with_corpus, alone = cycles.values()
    assert with_corpus < 0.95 * alone


def test_auto_asks_the_best_of_them(model):
    assert [part.name for part in Engine(model).drafter.parts] == ["suffix", "eagle3"]


def test_each_has_a_card_and_all_of_them_are_small():
    folders = sorted(CHECKPOINTS.glob("smollm2-135m/*"))
    assert [folder.name for folder in folders] == sorted(name.replace("-", "_") for name in DRAFTERS)
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) < 17e6
    for folder in folders:
        card = (folder / "README.md").read_text(encoding="utf-8")
        if folder.name == "suffix":
            assert "- Command: `specengine corpus " in card
            continue
        for part in ("- Data: ", "- Trained on ", "seed ", "- Command: `specengine train ", "| 1 | 0."):
            assert part in card
        assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["trained_length"] > 100


def test_models_lists_them():
    (entry,) = (entry for entry in embedded_models(check=False) if entry["name"] == "smollm2-135m")
    assert entry["drafters"] == sorted(DRAFTERS)
