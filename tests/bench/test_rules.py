"""`--rules`: contenders, quality of the text, and sequential cascades against their definition."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from specengine import Engine, SamplingParams
from specengine.bench.__main__ import app
from specengine.bench.quality.agreement import agreement, quality_rows
from specengine.bench.quality.perplexity import token_logprobs
from specengine.bench.race.contenders import Contender
from specengine.bench.race.measure import RaceSettings, measure
from specengine.bench.race.questions import Question
from specengine.bench.race.rule_sweep import exact_contender, family, numbers, rule_contenders, split_rules
from specengine.bench.race.sequential import SeqCascade, open_sequential
from specengine.draft_trees.tree import TreeBatch
from specengine.tensor_parallel.loading import load_model

TINY = "random:tiny-llama"
SELF = "draft-model:self,layers=1,length=2,adaptive=false"
PROMPTS = [[5, 9, 2], [7, 7, 1, 30], [11], [3, 14, 15, 9, 2, 6]]


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY)


@pytest.fixture(scope="module")
def small(tiny):
    return tiny.target.first_layers(1)


def bench(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


# ---- contenders


def test_values_separated_by_slashes_are_a_rule_each():
    assert split_rules("match  cascade:chow/opt,alpha=0.1/0.2") == [
        "match",
        "cascade:chow,alpha=0.1",
        "cascade:chow,alpha=0.2",
        "cascade:opt,alpha=0.1",
        "cascade:opt,alpha=0.2",
    ]
    assert split_rules("typical:epsilon=0.1/0.1,delta=0.3") == ["typical:epsilon=0.1,delta=0.3"]
    with pytest.raises(ValueError, match="rules: expected"):
        split_rules("  ")


def test_a_family_is_a_rule_without_its_numbers():
    names = ["match", "margin:theta=0.9", "margin:theta=0.9,mode=strict", "typical:epsilon=0.1,delta=1e9"]
    names += ["margin:lossless-base,theta=0.9", "cascade:deferral=opt,alpha=-1"]
    families = ["match", "margin", "margin:strict", "typical", "margin:lossless-base", "cascade:opt"]
    assert [family(name) for name in names] == families
    assert [numbers(name) for name in names] == ["", "0.9", "0.9", "0.1,1e9", "0.9", "-1"]


def test_each_rule_races_with_the_first_drafter_that_serves_it_and_the_exact_rule_beside(tiny):
    rules = ["margin:theta=0.9", "cascade:opt,alpha=0", "block", "seq-cascade:chow"]
    pairs = rule_contenders(rules, ["none", "prompt_lookup", SELF], tiny.target)
    assert pairs == [
        ("none", "match"),
        ("prompt_lookup", "match"),
        ("prompt_lookup", "margin:theta=0.9"),
        (SELF, "rejection"),
        (SELF, "cascade:opt,alpha=0"),
        (SELF, "block"),
        (SELF, "seq-cascade:chow"),
    ]
    assert all(exact_contender(*pair) in pairs for pair in pairs)
    assert rule_contenders(["rejection"], ["control", "prompt_lookup"], tiny.target)[1:] == [
        ("prompt_lookup", "rejection")
    ]
    tree = f"{SELF},tree=2x1"
    assert rule_contenders(["block", "traversal"], [tree, SELF], tiny.target)[1:] == [
        *((SELF, "rejection"), (SELF, "block")),
        *((tree, "rejection"), (tree, "traversal")),
    ]


@pytest.mark.parametrize(
    ("rules", "drafters", "says"),
    [
        (["cascade:opt"], ["prompt_lookup"], "cascade needs children sampled"),
        (["token-cascade:chow"], ["prompt_lookup"], "needs draft-model"),
        (["margin"], ["none"], "beside none"),
        (["magic"], ["prompt_lookup"], "rule: expected one of"),
        (["block"], ["prompt_lookup"], "block takes chains only"),
    ],
)
def test_rules_that_nobody_serves_are_refused(tiny, rules, drafters, says):
    with pytest.raises(ValueError, match=says):
        rule_contenders(rules, drafters, tiny.target)


# ---- quality


def test_agreement_ends_at_the_first_difference():
    assert agreement([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == 1
    assert agreement([[1, 9, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == 3 / 5  # equal tokens after a difference do not count
    assert agreement([[1, 2], [4, 5, 6]], [[1, 2, 3, 3], [4, 5]]) == 4 / 6


def test_the_likelihood_of_an_answer_is_that_of_its_tokens_alone(tiny):
    ids = [int(token) for token in torch.randint(0, tiny.config.vocab_size, (150,), generator=torch.manual_seed(0))]
    every = token_logprobs(tiny.target, ids)
    assert every.dtype == torch.float64 and len(every) == 149
    for first in (2, 63, 64, 65, 130, 149):
        assert torch.equal(token_logprobs(tiny.target, ids, first), every[first - 1 :])
    engine = Engine(tiny, drafter="none")
    out = engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=1))
    told = [each.logprob for each in out.logprobs]
    ours = token_logprobs(tiny.target, PROMPTS[0] + out.token_ids, len(PROMPTS[0]))
    assert ours.tolist() == pytest.approx(told, abs=1e-5)


def test_the_quality_of_every_run_is_judged_against_its_exact_rule(tiny):
    contenders = rule_contenders(
        ["margin:theta=0.2", "margin:theta=1", "cascade:chow,alpha=1", "seq-cascade:alpha=1"], [SELF], tiny.target
    )
    questions, params = [Question("a", ("x", "y")), Question("b", ("z",))], SamplingParams(max_new_tokens=12, seed=4)
    runs = measure(tiny, contenders, questions, params, RaceSettings(repetitions=1))
    done = []
    rows = quality_rows(tiny.target, runs, lambda: done.append(1))
    found = {run.rule: row for run, row in zip(runs, rows, strict=True)}
    assert len(done) == len(runs)
    for rule in ("match", "rejection", "margin:theta=1"):
        assert found[rule]["agreement"] == 1 and found[rule]["relaxed"] == 0
        assert found[rule]["log_likelihood"] == found["match"]["log_likelihood"]
    # The target's best tokens have the highest likelihood; tokens of its first layer alone have less.
    for rule in ("margin:theta=0.2", "cascade:chow,alpha=1"):
        assert found[rule]["relaxed"] > 0 and found[rule]["agreement"] < 1
    for rule in ("cascade:chow,alpha=1", "seq-cascade:alpha=1"):
        assert found[rule]["log_likelihood"] < found["match"]["log_likelihood"]
    assert found["seq-cascade:alpha=1"]["relaxed"] is None and found["seq-cascade:alpha=1"]["family"] == "seq-cascade"


def test_a_peers_text_is_compared_with_plain_decoding(tiny):
    runs = measure(
        tiny,
        [Contender("none")],
        [Question("a", ("x",))],
        SamplingParams(max_new_tokens=6),
        RaceSettings(repetitions=1),
    )
    peer = replace(runs[0], peer="other", drafter="prompt_lookup")
    ours, theirs = quality_rows(tiny.target, [*runs, peer], lambda: None)
    assert theirs["agreement"] == 1 and theirs["log_likelihood"] == ours["log_likelihood"] < 0


# ---- sequential cascades


def next_logits(model, ids):
    cache = model.new_cache()
    pages = cache.allocate(len(ids))
    return model.forward(TreeBatch.chains([ids], model.device), cache, cache.batch([pages], [0])).scores[-1].double()


def test_token_cascade_says_what_its_definition_says(tiny, small):
    """Generates token by token: the small model's best token if it is sure enough, else the target's."""
    tops = [torch.softmax(next_logits(small, ids), -1).max().item() for ids in PROMPTS]
    alpha = round(1 - sorted(tops)[1], 4)
    engine = open_sequential(tiny, SELF, f"token-cascade:chow,alpha={alpha}", 4)
    params = SamplingParams(max_new_tokens=25, ignore_eos=True)  # the target generates the last token
    from_small = 0
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        ids = list(prompt)
        for _ in range(24):
            ours = next_logits(small, ids)
            sure = torch.softmax(ours, -1).max().item() >= 1 - alpha
            from_small += sure
            ids.append(int((ours if sure else next_logits(tiny.target, ids)).argmax()))
        assert output.token_ids[:24] == ids[len(prompt) :]
        assert not output.stats.lossless
    assert 5 < from_small < 4 * 24 - 5


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize("kind", ["token-cascade", "seq-cascade"])
def test_sequential_cascades_take_the_shipped_draft_model(smollm2_path, kind):
    model = load_model(smollm2_path, device="cpu")
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    said = {}
    for alpha in (0, 1):  # no token is the draft model's; every token is
        engine = open_sequential(model, "draft-model,length=3", f"{kind}:chow,alpha={alpha}", 1)
        (said[alpha],) = (out.token_ids for out in engine.generate([model.tokenizer.encode("Once upon")], params))
    plain = Engine(model, drafter="none").generate(model.tokenizer.encode("Once upon"), params).token_ids
    assert said[0] == plain != said[1]


def test_seq_cascade_keeps_answers_that_the_small_model_is_sure_of(tiny, small):
    params = SamplingParams(max_new_tokens=10, temperature=0.7, seed=2)
    everything = open_sequential(tiny, SELF, "seq-cascade:chow,alpha=1", 4).generate(PROMPTS, params)
    nothing = open_sequential(tiny, SELF, "seq-cascade:alpha=0", 4).generate(PROMPTS, params)
    plain = Engine(tiny, drafter="none").generate(PROMPTS, params)
    assert [each.token_ids for each in nothing] == [each.token_ids for each in plain]
    means = [
        token_logprobs(small, prompt + each.token_ids, len(prompt)).mean().item()
        for prompt, each in zip(PROMPTS, everything, strict=True)
    ]
    assert len(set(means)) == 4
    threshold = sum(sorted(means)[1:3]) / 2
    half = open_sequential(tiny, SELF, f"seq-cascade:chow,alpha={1 - math.exp(threshold)}", 4)
    assert isinstance(half, SeqCascade)
    for mean, found, kept, redone in zip(means, half.generate(PROMPTS, params), everything, plain, strict=True):
        assert found.token_ids == (kept if mean >= threshold else redone).token_ids
        assert found.stats.cycles == (0 if mean >= threshold else redone.stats.cycles)  # passes of the target
        assert found.stats.seconds_by_phase["draft"] > 0 and not found.stats.lossless


@pytest.mark.parametrize(
    ("drafter", "rule", "says"),
    [
        (SELF, "token-cascade:opt", "deferral: expected one of chow"),
        (SELF, "seq-cascade:alpha=2", "alpha"),
        (SELF, "seq-cascade:theta=2", "has no option 'theta'"),
        ("prompt_lookup", "seq-cascade", "needs the drafter draft-model"),
        ("draft-model:self,layers=1,tree=2x2", "token-cascade", "without a tree"),
    ],
)
def test_sequential_cascades_refuse_what_they_are_not(tiny, drafter, rule, says):
    with pytest.raises(ValueError, match=says):
        open_sequential(tiny, drafter, rule, 1)


# ---- the command

SMALL = ("--model", TINY, "--limit", "2", "--max-new-tokens", "8", "--repetitions", "1")


@pytest.mark.full
def test_the_command_writes_table_json_and_picture(tmp_path):
    drafters = ("--drafters", f"prompt_lookup,{SELF}", "--temperature", "0,0.8")
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    rules = "margin:theta=0.5/0.9 lossy:alpha=0.5 seq-cascade:alpha=0.9"
    result = bench(*SMALL, *drafters, *files, "--batch", "1,2", "--rules", rules)
    assert result.exit_code == 0, result.output
    assert "log-likelihood" in result.stdout and result.stdout.count("temperature 0") == 2
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["temperature"], run["batch"], run["drafter"], run["rule"]) for run in runs] == [
        (temperature, batch, drafter, rule)
        for temperature in (0, 0.8)
        for batch in (1, 2)
        for drafter, rule in [
            ("none", "match"),
            ("prompt_lookup", "match"),
            ("prompt_lookup", "margin:theta=0.5"),
            ("prompt_lookup", "margin:theta=0.9"),
            (SELF, "rejection"),
            (SELF, "lossy:alpha=0.5"),
            (SELF, "seq-cascade:alpha=0.9"),
        ]
    ]
    assert all(run["log_likelihood"] < 0 <= run["agreement"] <= 1 and run["speedup"] > 0 for run in runs)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rules", "cascade:opt"), "rule: cascade needs"),
        (("--rules", "match", "--plot", "/nowhere/x.png"), "plot: cannot write"),
        (("--temperature", "warm"), "temperature: expected numbers"),
        (("--temperature", "-1"), "temperature: expected a number from 0"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(arguments, says):
    result = bench(*SMALL, *arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and says in result.stderr


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench(*SMALL, "--rules", "match", "--plot", "x.png")
    assert result.exit_code == 2 and "plot: needs matplotlib" in result.stderr
