"""Trained drafters draw their children: the first three tokens of many texts against the target's exact law.

A logit bias leaves five tokens, one of which most of the drafters do not know. Both distributions are shaped by it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.ops.row_tools import take_rows
from tests.drafters.trained_files import write_trained
from tests.engines import tiny_engine, tiny_model

pytestmark = [pytest.mark.statistics, pytest.mark.filterwarnings("ignore:drafter")]

PROMPT, LENGTH, TEXTS = [5, 9, 13], 3, 3072
TEMPERATURE = 0.7
OPTIONS = {  # small trees of several levels
    "dflash": "nodes=16,top_k=3",
    "domino": "nodes=16,top_k=3",
    "dspark": "nodes=22,top_k=3",
    "eagle": "tree=eagle_25",
    "eagle3": "top_k=3,levels=3",
    "fasteagle": "top_k=3",
    "glide": "length=3",
    "jetspec": "nodes=16,top_k=3",
    "medusa": "nodes=24",
    "mtp": "top_k=2,levels=3",
    "p_eagle": "length=3,nodes=10",
    "pard": "length=3,nodes=10",
}
CHAINS = {
    "dflash": "tree=chain",
    "domino": "tree=chain",
    "dspark": "tree=chain",
    "eagle": "top_k=1,levels=3",
    "eagle3": "top_k=1,levels=3",
    "fasteagle": "top_k=1",
    "glide": "cape=false,length=3",
    "jetspec": "tree=chain",
    "mtp": "top_k=1,levels=3",
    "p_eagle": "tree=chain,length=3",
    "pard": "tree=chain,length=3",
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    return write_trained(tmp_path_factory.mktemp("trained"))


def engine_of(spec: str, rule: str) -> Engine:
    return tiny_engine(f"{spec},sample=true", rule=rule, max_batch_size=128)


def allowed_by(engine: Engine) -> list[int]:
    """Returns four tokens of the drafter, and one that it does not know, where there is one."""
    columns = engine.drafter.columns
    known = [*range(columns.count)] if columns.tokens is None else columns.tokens.tolist()
    other = next((token for token in range(engine.model.config.vocab_size) if token not in known), known[-1])
    return [*known[3:19:4], other]


def counted(engine: Engine, allowed: list[int]) -> np.ndarray:
    """Counts each first, second and third token, int64 [5, 5, 5]."""
    bias = dict.fromkeys(allowed, 100.0)
    params = SamplingParams(max_new_tokens=LENGTH, temperature=TEMPERATURE, logit_bias=bias, seed=1, n=TEXTS)
    outputs = engine.generate(PROMPT, params)
    assert len({output.stats.cycles for output in outputs}) > 1, "refusals and accepted drafts must occur"
    counts = np.zeros((len(allowed),) * LENGTH, dtype=np.int64)
    for output in outputs:
        counts[tuple(map(allowed.index, output.token_ids))] += 1
    return counts


def law(allowed: list[int]) -> np.ndarray:
    """Returns the target's probability of each text, by plain passes."""

    def after(path: list[int]) -> np.ndarray:
        target = tiny_model().target
        cache, tokens = target.new_cache(), [*PROMPT, *path]
        rows = TreeBatch.chains([tokens], torch.device("cpu"))
        hidden = target.hidden(rows, cache, cache.batch([cache.allocate(len(tokens))], [0]))
        logits = target.logits(take_rows(hidden, [len(tokens) - 1]))[0, allowed]
        return (logits.double() / TEMPERATURE).softmax(-1).numpy()

    first = after([])
    second = np.stack([after([a]) for a in allowed])
    third = np.stack([[after([a, b]) for b in allowed] for a in allowed])
    return first[:, None, None] * second[:, :, None] * third


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Computes chi-square of all texts; rare ones are counted together."""
    wanted = expected.ravel() * counts.sum()
    rare = wanted < 5
    found, wanted = (np.append(each[~rare], each[rare].sum()) for each in (counts.ravel(), wanted))
    return float(stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue)


def laws(spec: str, rule: str) -> tuple[float, float]:
    """Returns the p-values of what an engine says, and of what it says where the rule hears of flatter draft logits."""
    engine = engine_of(spec, rule)
    allowed = allowed_by(engine)
    expected, right = law(allowed), counted(engine, allowed)
    draft = engine.drafter.draft_for

    def flatter(wants, requests):
        drawn = draft(wants, requests)
        return replace(drawn, logits=replace(drawn.logits, logits=0.5 * drawn.logits.logits))

    engine.drafter.draft_for = flatter
    return p_value(right, expected), p_value(counted(engine, allowed), expected)


@pytest.mark.full
def test_drawn_children_of_a_backbone_keep_the_target_s_law(specs):
    right, wrong = laws(f"{specs['fasteagle']},{OPTIONS['fasteagle']}", "rejection")
    assert right > 1e-4 and wrong < 1e-9


@pytest.mark.full
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("name", OPTIONS)
def test_drawn_children_of_every_trained_drafter_keep_the_target_s_law(specs, name, rule):
    right, wrong = laws(f"{specs[name]},{OPTIONS[name]}", rule)
    assert right > 1e-4 and wrong < 1e-9


@pytest.mark.full
@pytest.mark.parametrize("name", CHAINS)
def test_drawn_chains_of_every_trained_drafter_keep_the_target_s_law_under_block(specs, name):
    right, wrong = laws(f"{specs[name]},{CHAINS[name]}", "block")
    assert right > 1e-4 and wrong < 1e-9
