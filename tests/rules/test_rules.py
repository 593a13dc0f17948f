"""Rules in the engine: specs, demands on drafters, neutral parameters, and reports."""

import dataclasses

import pytest
import torch

from specengine import SamplingParams
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.ops.draw_siblings import draw_siblings
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.verify_tree import verify_tree
from specengine.rules import RULES, Wants, parse_rule
from specengine.rules.cascade import Bild, Cascade, Lossy
from specengine.rules.lossless import Match, Rejection
from specengine.rules.margin import Margin
from specengine.rules.typical import Typical
from tests.engines import tiny_engine
from tests.ops.cases import randn
from tests.ops.verifying import PARAMS, make_batch, table_for
from tests.rules.lossy import IDS, LOSSY

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 9, 7, 8], [5] * 6]
DRAFT = "draft-model:self,layers=1,tree=2x2x1"


def exact_rule(rule):
    return Match() if rule.wants is Wants.NOTHING else Rejection()


def text_of(rule, temperature: float) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5)
    engine = tiny_engine(DRAFT, rule=rule)
    return [output.token_ids for output in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("match", Match()),
        ("margin:theta=0.84", Margin(0.84)),
        ("margin: lossless-base, theta=1", Margin(1.0, "lossless-base")),
        ("cascade:opt,alpha=-0.1", Cascade("opt", -0.1)),
        ("cascade:alpha=0.25,deferral=chow", Cascade("chow", 0.25)),
        ("lossy:alpha=0.2,beta=0.9", Lossy(0.2, 0.9)),
        ("lossy:alpha=0.95,beta=0.05", Lossy(0.95, 0.05)),  # 1 - 0.95 is a little more than 0.05
        ("typical", Typical()),
        (Bild(2.0), Bild(2.0)),
    ],
)
def test_a_spec_names_a_rule_and_its_parameters(spec, rule):
    assert parse_rule(spec) == rule


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "rule: expected one of match, rejection, block"),
        ("", "rule: expected NAME"),
        (7, "rule: expected NAME"),
        ("margin:beta=1", "margin has no option 'beta'; its options: mode, theta"),
        ("margin:theta=1.5", "theta: expected a number from 0 to 1, got 1.5"),
        ("margin:theta=nan", "theta: expected a number from 0 to 1"),
        ("margin:lax", "mode: expected one of strict, lossless-base, reference, got 'lax'"),
        ("cascade:token-v4", "deferral: expected one of chow, diff"),
        ("cascade:chow,alpha=2", "alpha: expected a number from -1 to 1"),
        ("lossy:alpha=0.5,beta=0.2", "beta: expected a number from 0.5 to 1"),
        ("lossy:alpha=1,beta=0", "beta: expected a number above 0, got 0"),
        ("typical:0.09", "expected option=value, got '0.09'.*epsilon, delta"),
        ("match:theta=1", "match has no option 'theta'; its options: none"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_possible_ones(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_rule(spec)


@pytest.mark.parametrize("rule", ["cascade", "bild", "lossy", "margin:reference"])
def test_a_rule_that_needs_a_distribution_refuses_a_drafter_without_one(rule):
    with pytest.raises(
        ValueError, match=r"^rule: .* prompt_lookup does not give, .* no distribution; .*: (?!.*lookup).*draft_model"
    ):
        tiny_engine(rule=rule)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", LOSSY, ids=IDS)
def test_the_neutral_parameter_is_the_exact_rule(rule, temperature):
    neutral = rule.neutral
    if isinstance(rule, Margin) and rule.mode == "strict" and temperature:
        pytest.skip("never samples: its neutral parameter is greedy decoding")
    assert text_of(neutral, temperature) == text_of(exact_rule(rule), temperature)


def verify_siblings(rule, target: list[float], draft: list[float], children: list[int], trials: int = 4000):
    """Runs one cycle for each seed 0, 1, ...: children of the root are drawn from `draft` without replacement."""
    count = 1 + len(children)
    tree = TreeBatch.of([DraftTree([0, *children], [-1, *[0] * len(children)])] * trials, torch.device("cpu"))
    rows = torch.full((trials, count), -1, dtype=torch.int32)
    rows[:, 0] = 0
    ones = torch.ones(trials, dtype=torch.int32)
    return verify_tree(
        torch.tensor(target).log().expand(trials * count, -1).contiguous(),
        tree,
        table_for(SamplingParams(temperature=1.0), trials),
        TokenHistory(torch.zeros(trials, 1, dtype=torch.int32), ones, ones),
        rule=rule,
        draft=DraftLogits(torch.tensor([draft]).log(), rows.flatten()),
    )


@pytest.mark.parametrize("rule", [r for r in LOSSY if r.wants is Wants.SAMPLED_ONLY], ids=lambda rule: rule.kernel)
def test_nothing_is_relaxed_at_the_neutral_parameter(rule):
    """The second sibling is tried against the residual of the first, as in the exact rule."""
    case = ([0.4, 0.6], [0.6, 0.4], [0, 1])
    neutral, exact = verify_siblings(rule.neutral, *case), verify_siblings(Rejection(), *case)
    assert torch.equal(neutral.path, exact.path) and torch.equal(neutral.bonus, exact.bonus)
    assert (exact.path[:, 1] == 2).any() and (exact.path_length == 2).all()
    assert not neutral.relaxed.any()


@pytest.mark.parametrize("beta", [1.0, 0.2, 0.05, 1e-3])
def test_the_residual_of_lenient_acceptance_holds_for_every_beta(beta):
    target, draft = [1e-7, 0.3, 0.5, 0.2], [0.9, 0.05, 0.03, 0.02]
    out = verify_siblings(Lossy(1 - beta, beta), target, draft, [0])
    refused = out.bonus[out.path_length == 1]
    law = (torch.tensor(target) / beta - torch.tensor(draft)).clamp(min=0)
    found = torch.bincount(refused, minlength=4) / len(refused)
    assert len(refused) > 3000 and (found - law / law.sum()).abs().max() < 0.04


def test_tokens_that_a_cut_run_leaves_out_are_not_counted_as_relaxed():
    engine = tiny_engine("draft-model:self,layers=1,length=5", rule=Lossy(1.0), eos=frozenset(range(320)))
    outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, temperature=1.0))
    assert all(len(output.token_ids) == 1 and output.stats.relaxed <= 1 for output in outputs)


@pytest.mark.parametrize("rule", LOSSY, ids=IDS)
def test_the_parameter_matters(rule):
    hot = {"max_new_tokens": 24, "temperature": 0.0 if isinstance(rule, Margin) else 1.5}
    engine = tiny_engine(DRAFT, rule=dataclasses.replace(rule, theta=0.0) if isinstance(rule, Margin) else rule)
    outputs = [engine.generate(PROMPTS, SamplingParams(seed=seed, **hot)) for seed in range(6)]
    assert sum(output.stats.relaxed for group in outputs for output in group) > 0


@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_lossless_sampling_rules_report_nothing_relaxed(name):
    engine = tiny_engine(DRAFT, rule=name)
    outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, temperature=1.2))
    assert all(o.stats.relaxed == 0 and o.stats.lossless and o.stats.rule == name for o in outputs)
    assert any(o.stats.tau > 1 for o in outputs)


def test_a_lossy_rule_is_labelled():
    (output,) = tiny_engine(rule="margin").generate(PROMPTS[:1], SamplingParams(max_new_tokens=4))
    assert output.stats.rule == "margin" and not output.stats.lossless


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup,adaptive=false", DRAFT])
def test_lossless_rules_give_the_text_of_plain_decoding_at_temperature_0(rule, drafter):
    params = SamplingParams(max_new_tokens=24)
    plain = [o.token_ids for o in tiny_engine("none").generate(PROMPTS, params)]
    assert [o.token_ids for o in tiny_engine(drafter, rule=rule).generate(PROMPTS, params)] == plain


def test_rejection_without_a_draft_gives_the_text_of_match():
    params = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=3)
    plain = [o.token_ids for o in tiny_engine("none").generate(PROMPTS, params)]
    assert [o.token_ids for o in tiny_engine("none", rule="rejection").generate(PROMPTS, params)] == plain


def test_block_takes_chains_and_refuses_trees():
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    tiny_engine("draft-model:self,layers=1,length=3", rule="block").generate(PROMPTS, params)
    tiny_engine("prompt_lookup,matches=1,min_ngram=2,max_ngram=2,adaptive=false", rule="block").generate(PROMPTS)
    tiny_engine("none", rule="block").generate(PROMPTS, params)
    for trees in (DRAFT, "prompt_lookup"):
        with pytest.raises(ValueError, match=r"^rule: block takes chains only, and drafter .* traversal takes trees$"):
            tiny_engine(trees, rule="block")


READS_DRAFT = ["rejection", "traversal", "block", "cascade", "bild", "lossy", "margin:reference"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", READS_DRAFT)
def test_draft_logits_without_a_distribution_are_refused_by_their_name(rule, temperature):
    batch = make_batch([[-1, 0, 1], [-1, 0]], [SamplingParams(temperature=temperature)] * 2, 20)
    draft = DraftLogits(randn(3, 20, seed=9), torch.tensor([0, 1, -1, 2, -1], dtype=torch.int32))
    draft.logits[:, 5:9] = -torch.inf  # masked tokens are no fault of the drafter
    good = verify_tree(*batch.arguments(), rule=parse_rule(rule), draft=draft)
    assert (good.bonus >= 0).all()
    for bad in (torch.nan, torch.inf, None):
        poisoned = draft.logits.clone()
        poisoned[2, slice(None) if bad is None else 17] = -torch.inf if bad is None else bad
        what = dataclasses.replace(draft, logits=poisoned)
        with pytest.raises(ValueError, match=r"^draft_logits: row 2 \(request 1, position \d+\) has NaN or infinite"):
            verify_tree(*batch.arguments(), rule=parse_rule(rule), draft=what)
        assert torch.equal(verify_tree(*batch.arguments(), draft=what).bonus, verify_tree(*batch.arguments()).bonus)
    batch.logits[3, 17] = torch.nan
    with pytest.raises(ValueError, match=r"^logits: row 3 \(request 1"):
        verify_tree(*batch.arguments(), rule=parse_rule(rule), draft=draft)


def test_a_drafter_s_bad_logits_are_an_error_and_the_engine_stays_usable(monkeypatch):
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2)
    engine = tiny_engine(DRAFT, rule="rejection")
    expected = engine.generate(PROMPTS[0], params).token_ids
    draft = engine.drafter.draft_for

    def poisoned(wants, requests):
        drawn = draft(wants, requests)
        drawn.logits.logits[0, 3] = torch.nan
        return drawn

    with monkeypatch.context() as patch:
        patch.setattr(engine.drafter, "draft_for", poisoned)
        with pytest.raises(ValueError, match=r"^draft_logits: row 0 .* has NaN or infinite scores"):
            engine.generate(PROMPTS[0], params)
    assert engine.generate(PROMPTS[0], params).token_ids == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None], ids=str)
def test_siblings_are_not_drawn_from_scores_without_a_distribution(bad):
    batch = make_batch([[-1], [-1]], [SamplingParams(temperature=1.0)] * 2, 20)
    logits, both = randn(2, 20), torch.tensor([0, 1], dtype=torch.int32)
    logits[0, 1:] = -torch.inf
    logits[1, slice(None) if bad is None else 7] = -torch.inf if bad is None else bad
    rest = (batch.params, batch.history, 2, False)
    root = torch.zeros_like(both)
    with pytest.raises(ValueError, match=r"^logits: row 1 of the drafter \(request 1, node 0\) has NaN or infinite"):
        draw_siblings(logits, root, batch.tree, both, *rest)
    assert draw_siblings(logits[:1], root[:1], batch.tree, both[:1], *rest).tolist() == [[0, -1]]
    with pytest.raises(ValueError, match=r"^drawn: expected at least one column"):
        draw_siblings(logits, root, batch.tree, both, batch.params, batch.history, 0, False)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "match"])
def test_every_rule_serves_trees_without_a_distribution(rule):
    """One-hot proposals are deterministic children to the op, under all parameters."""
    trees = [[-1]] * 3 + [[-1, 0, 1], [-1, 0]] if rule == "block" else [[-1, 0, 0, 1, 1, 2], [-1], [-1, 0, 1]]
    for params in PARAMS.values():
        batch = make_batch(trees, [params] * len(trees), 40, seed=3)
        out = verify_tree(*batch.arguments(), rule=parse_rule(rule))
        assert (out.bonus >= 0).all() and (out.path_length >= 1).all()
        assert torch.equal(out.path[:, 0], torch.zeros(len(trees), dtype=torch.int32))
