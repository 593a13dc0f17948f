"""Constrained requests in the engine: speculation changes none of their tokens, and every text is valid."""

import asyncio
import dataclasses
import json
import math
import random
import re
from collections import Counter

import jsonschema
import pytest
import scipy.stats

from specengine import AsyncEngine, Engine, SamplingParams
from specengine.draft_trees.tree import DraftTree
from specengine.types import ConstraintFailed
from tests.constraints.masks import allowed_tokens
from tests.constraints.vocabulary import (
    CALL,
    CHOICES,
    CONSTRAINTS,
    END,
    ENDS,
    REGEX,
    SCHEMA,
    THINK_END,
    THINKING,
    TOKENIZER,
    TURN,
    talking_model,
)
from tests.engine.prefixes import SPECS
from tests.engines import Oracle, ids

PROMPTS = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("name a thing", "yes or no?", "the age", "x")]
FREE = SamplingParams(max_new_tokens=30)


def params_of(temperature: float, tokens: int = 60, **options) -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=7 + number, **given, **options)
        for number, given in enumerate(CONSTRAINTS)
    ]


def late_ends(temperature: float) -> list[SamplingParams]:
    """A text without a grammar and one with: their ends are likely, and forbidden for some tokens."""
    likely = {"logit_bias": dict.fromkeys(ENDS, 9.0), "temperature": temperature, "seed": 5}
    free = SamplingParams(max_new_tokens=40, min_tokens=11, stop_token_ids=[ord("e")], **likely)
    return [free, SamplingParams(max_new_tokens=40, min_tokens=7, regex="[a-c ]+", **likely)]


def is_valid(output, params: SamplingParams) -> bool:
    if params.json_schema is not None:
        try:
            jsonschema.validate(json.loads(output.text), json.loads(params.json_schema))
        except (ValueError, jsonschema.ValidationError):
            return False
        return output.text == json.dumps(json.loads(output.text), ensure_ascii=False)
    if params.regex is not None:
        return re.fullmatch(params.regex, output.text) is not None
    if params.choices is not None:
        return output.text in params.choices
    thought, marked, value = output.text.partition("</think>")
    return bool(marked) and re.fullmatch("[a-z ]{0,20}", thought) and json.loads(value).get("name") in ("the", "yes")


def engine_of(drafter="none", **options) -> Engine:
    return Engine(talking_model(), drafter=drafter, **options)


def plain_outputs(prompts, params):
    return [engine_of().generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("name", SPECS)
def test_no_drafter_changes_a_token_of_a_constrained_text(folders, name, temperature):
    params = [*params_of(temperature), FREE, *params_of(temperature, tokens=9), *late_ends(temperature)]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params))]
    plain = plain_outputs(prompts, params)
    assert all(is_valid(output, own) for output, own in zip(plain, params[:4], strict=False))
    assert all(len(output.token_ids) > own.min_tokens for output, own in zip(plain[-2:], params[-2:], strict=True))
    assert all(output.finish_reason == "stop" for output in plain[-2:])
    for batch in (1, 3, 16):
        engine = engine_of(SPECS[name].format(**folders), max_batch_size=batch)
        outputs = engine.generate(prompts, params)
        assert ids(outputs) == ids(plain)
        assert [output.text for output in outputs] == [output.text for output in plain]
        assert [output.finish_reason for output in outputs] == [output.finish_reason for output in plain]


class WithEnds(Oracle):
    """Drafts the known continuation among wrong nodes, many of which are ends of the text or special tokens."""

    def _draft_one(self, request) -> DraftTree:
        tree = super()._draft_one(request)
        answer = next(a for a in self.answers if a[: len(request.tokens)] == request.tokens)
        right = {*answer[len(request.tokens) :]}
        draw = self.random
        tokens = [
            token if token in right or draw.random() < 0.6 else draw.choice(SPECIALS) for token in tree.tokens[1:]
        ]
        return DraftTree([tree.tokens[0], *tokens], tree.parents)


SPECIALS = (END, TURN, THINK_END, CALL)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("tokens", [60, 23, 10])
def test_ends_and_special_tokens_inside_of_a_draft_change_nothing(temperature, tokens):
    params = params_of(temperature, tokens) * 4
    prompts = [PROMPTS[number % 4] for number in range(4) for _ in CONSTRAINTS]
    plain = plain_outputs(prompts, params)
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    for seed in range(3):
        for batch in (1, 16):
            engine = engine_of(WithEnds(answers, 320, nodes=24, seed=seed), max_batch_size=batch)
            outputs = engine.generate(prompts, params)
            assert ids(outputs) == ids(plain)
            assert sum(o.stats.cycles for o in outputs) < sum(o.stats.cycles for o in plain) / 1.5


class Fixed(Oracle):
    """Drafts one chain of given tokens after every root."""

    def __init__(self, chain):
        super().__init__([], 320)
        self.chain = chain

    def _draft_one(self, request) -> DraftTree:
        chain = self.chain(request)[: request.draft_limit]
        return DraftTree([request.tokens[-1], *chain], [*range(-1, len(chain))])


def rest_of(answer):
    return lambda request: answer[len(request.tokens) - request.prompt_length :][:20]


def test_the_end_of_thinking_inside_of_a_draft_starts_the_grammar_there():
    """The draft runs through free text, </think> and JSON at once; vLLM applied the JSON's mask a window late."""
    params = SamplingParams(max_new_tokens=60, temperature=0.8, seed=3, grammar=THINKING)
    plain = engine_of().generate(PROMPTS[0], params)
    assert THINK_END in plain.token_ids[1:-3]
    output = engine_of(Fixed(rest_of(plain.token_ids))).generate(PROMPTS[0], params)
    assert output.token_ids == plain.token_ids and output.stats.cycles <= len(plain.token_ids) // 20 + 1
    wrong = [token if token < 256 else THINK_END for token in plain.token_ids]
    wrong[plain.token_ids.index(THINK_END) + 1 :] = [CALL] * 20
    output = engine_of(Fixed(rest_of(wrong))).generate(PROMPTS[0], params)
    assert output.token_ids == plain.token_ids


def test_the_token_behind_the_last_accepted_one_is_masked():
    """vLLM left the row of the bonus token unmasked."""
    params = SamplingParams(choices=["then", "thy"], max_new_tokens=8)
    plain = engine_of().generate(PROMPTS[0], params)
    for cut in range(len(plain.token_ids)):
        output = engine_of(Fixed(rest_of(plain.token_ids[:cut]))).generate(PROMPTS[0], params)
        assert output.token_ids == plain.token_ids and output.text in ("then", "thy")


def test_masks_belong_to_the_rows_that_are_left_of_a_cut_draft():
    """Forbidden nodes before, between and behind the right ones; vLLM's masks had the width of the whole draft."""
    params = SamplingParams(regex="[ab]{10}", max_new_tokens=20, temperature=1.0, seed=5, logprobs=1)
    plain = engine_of().generate(PROMPTS[1], params)

    class Scattered(Fixed):
        def _draft_one(self, request) -> DraftTree:
            right = rest_of(plain.token_ids)(request)[: request.draft_limit]
            tokens, parents, last = [request.tokens[-1]], [-1], 0
            for token in right:
                tokens += [CALL, ord("c"), token]
                parents += [last, last, last]
                last = len(tokens) - 1
            return DraftTree(tokens[:60], parents[:60])

    output = engine_of(Scattered(None)).generate(PROMPTS[1], params)
    assert output.token_ids == plain.token_ids and output.logprobs == plain.logprobs
    assert output.stats.cycles == 1


def test_masks_of_one_cycle_are_not_those_of_the_next():
    """Requests of one batch go different ways, at different speeds, and leave at different times."""
    params = [
        SamplingParams(regex=f"{letter}{{{3 + 4 * n}}}", max_new_tokens=40) for n, letter in enumerate("abcdefgh")
    ]
    outputs = engine_of("prompt_lookup,adaptive=false").generate([PROMPTS[0]] * 8, params)
    assert [output.text for output in outputs] == [letter * (3 + 4 * n) for n, letter in enumerate("abcdefgh")]


def test_stop_strings_still_cut_a_constrained_text():
    params = SamplingParams(choices=["yes, of course"], stop=[" of"], max_new_tokens=40)
    for drafter in ("none", "prompt_lookup,adaptive=false"):
        output = engine_of(drafter).generate(PROMPTS[0], params)
        assert (output.text, output.finish_reason) == ("yes,", "stop")


def test_the_text_ends_where_the_language_does_even_under_ignore_eos():
    for options in ({}, {"ignore_eos": True}):
        output = engine_of().generate(PROMPTS[0], SamplingParams(choices=["the then"], max_new_tokens=40, **options))
        assert output.text == "the then" and output.finish_reason == "stop" and output.token_ids[-1] in ENDS
    some = SamplingParams(regex="[ab]{3,20}", ignore_eos=True, max_new_tokens=40, temperature=1.0)
    assert len(engine_of().generate(PROMPTS[0], some).text) == 20


def test_samples_logprobs_and_traces_of_a_constrained_prompt():
    params = SamplingParams(json_schema=SCHEMA, max_new_tokens=60, temperature=0.9, n=3, logprobs=2, trace=True)
    plain, drafted = (engine_of(name).generate(PROMPTS[0], params) for name in ("none", "prompt_lookup,adaptive=false"))
    assert ids(plain) == ids(drafted) and len({output.text for output in plain}) == 3
    for one, other in zip(plain, drafted, strict=True):
        assert one.logprobs == other.logprobs
        sources = [names for cycle in other.trace for names in cycle.sources]
        assert other.stats.sources["grammar"].accepted == sum("grammar" in names for names in sources) > 10
        assert "grammar" not in one.stats.sources
        for cycle in other.trace:
            assert not cycle.sources or len(cycle.sources) == len(cycle.accepted)


def test_a_schema_is_read_once_for_all_samples(monkeypatch):
    engine, read = engine_of(), []
    constraint = engine.model.grammars.constraint
    monkeypatch.setattr(engine.model.grammars, "constraint", lambda params: read.append(params) or constraint(params))
    outputs = engine.generate(PROMPTS[0], SamplingParams(choices=["yes", "no"], temperature=1.0, n=5))
    assert len(read) == 1 and {output.text for output in outputs} <= {"yes", "no"}


def test_plain_decoding_verifies_no_forced_token():
    output = engine_of().generate(PROMPTS[0], SamplingParams(choices=["yes, always"], max_new_tokens=40, trace=True))
    assert {len(cycle.tokens) for cycle in output.trace} == {1}


def test_forced_text_is_free():
    params = SamplingParams(json_schema={"const": {"name": "the name", "age": [3, 3, 3]}}, max_new_tokens=80)
    output = engine_of("prompt_lookup,adaptive=false").generate(PROMPTS[0], params)
    assert json.loads(output.text) == {"name": "the name", "age": [3, 3, 3]}
    assert output.stats.cycles <= 3 < len(output.token_ids) / 6


def test_bad_constraints_are_refused_before_anything_runs():
    engine = engine_of()
    with pytest.raises(ValueError, match=r"^regex: "):
        engine.generate(PROMPTS[:2], [SamplingParams(regex="a"), SamplingParams(regex="(")])
    with pytest.raises(ValueError, match=r"^json_schema: "):
        engine.stream(PROMPTS[0], SamplingParams(json_schema={"type": "string", "enum": []}))
    assert engine.metrics.snapshot().prompt_tokens == 0
    with pytest.raises(ValueError, match=r"^choices: this model has no tokenizer"):
        model = dataclasses.replace(talking_model(), tokenizer=None)
        Engine(model, drafter="none").generate([3, 4], SamplingParams(choices=["a"]))


def failing(engine, after: int):
    """Lets the constraints of one kind give up after some tokens."""
    made = engine.model.grammars.constraint

    def constraint(params):
        own = made(params)
        if own is not None and params.regex:
            advance = own.advance

            def limited(tokens):
                advance(tokens)
                if len(own._text) > after:
                    raise ConstraintFailed("constraint: too complex")

            own.advance = limited
        return own

    engine.model.grammars.constraint = constraint
    return engine


def test_a_constraint_that_fails_midway_fails_its_request_alone():
    params = [SamplingParams(regex="[ab]{30}", max_new_tokens=50), SamplingParams(choices=CHOICES), FREE]
    plain = plain_outputs(PROMPTS[1:3], params[1:])
    engine = failing(engine_of("prompt_lookup,adaptive=false"), after=5)
    with pytest.raises(ConstraintFailed, match=r"^constraint: too complex"):
        engine.generate(PROMPTS[:3], params)
    events = engine.stream(PROMPTS[0], params[0])
    with pytest.raises(ConstraintFailed, match=r"^constraint: too complex"):
        texts = [event.text for event in events]
        raise AssertionError(texts)

    async def serve():
        async with AsyncEngine(engine) as server:
            calls = (server.generate(prompt, own) for prompt, own in zip(PROMPTS, params, strict=False))
            return await asyncio.gather(*calls, return_exceptions=True)

    failed, *good = asyncio.run(serve())
    assert isinstance(failed, ConstraintFailed) and str(failed) == "constraint: too complex"
    assert ids(good) == ids(plain)
    assert engine.generate(PROMPTS[1], params[1]).token_ids == plain[0].token_ids  # the engine goes on


def test_constrained_prompts_share_cached_pages():
    engine = engine_of("prompt_lookup,adaptive=false")
    prompt = (PROMPTS[0] * 20)[:200]
    first, second = (engine.generate(prompt, params_of(0.8)[0]) for _ in range(2))
    assert first.token_ids == second.token_ids and second.stats.prefix_hit_tokens > 0


CHAIN, TREE = "draft-model:self,layers=1,length=3,adaptive=false", "draft-model:self,layers=1,tree=3x2,adaptive=false"
RULES = {
    **dict.fromkeys(("rejection", "traversal", "typical", "margin"), TREE),
    **dict.fromkeys(("block", "cascade:opt", "lossy", "bild"), CHAIN),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_to_the_constraint(rule):
    engine = engine_of(RULES[rule], rule=rule)
    for seed in range(4):
        params = [dataclasses.replace(own, seed=seed) for own in params_of(0.9)]
        outputs = engine.generate(PROMPTS, params)
        assert all(is_valid(output, own) for output, own in zip(outputs, params, strict=True))
    late = [dataclasses.replace(own, n=4) for own in late_ends(0.9)]
    for outputs, own in zip(engine.generate(PROMPTS[:2], late), late, strict=True):
        assert all(len(output.token_ids) > own.min_tokens for output in outputs)


def masked_law(regex: str, texts: list[str], temperature: float) -> dict[str, float]:
    """The probability of each text, token by token from the model's own distribution where only some are allowed."""
    engine, constraint, law = engine_of(), SamplingParams(regex=regex), {}
    for text in texts:
        chance, path = 1.0, []
        for token in (*TOKENIZER.encode(text, add_special_tokens=False), END):
            own = engine.model.grammars.constraint(constraint)
            own.advance(path)
            allowed = allowed_tokens(own)
            params = SamplingParams(max_new_tokens=1, logprobs=320)
            (known,) = engine.generate([*PROMPTS[0], *path], params).logprobs
            weights = {other: math.exp(value / temperature) for other, value in known.top if other in allowed}
            right = sum(weights[end] for end in ENDS) if token == END else weights[token]
            chance *= right / sum(weights.values())
            path.append(token)
        law[text] = chance
    return law


sampled = pytest.mark.parametrize(
    "drafter",
    [
        CHAIN,
        TREE,
        "draft-model:self,layers=1,tree=3x2,replacement=true,adaptive=false",
        "eagle3:{eagle3},nodes=12,levels=3,top_k=3,sample=true",
        "medusa:{medusa},nodes=12,sample=true",
    ],
)


@pytest.mark.full
@pytest.mark.statistics
@sampled
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_cut_drafts_leave_the_law_of_a_rule_as_it_is(folders, rule, drafter):
    """The drafter draws from all tokens: most of its children are cut, ends of the text among them are not."""
    texts = [one + two for one in "abc" for two in ("", *"xyz")]
    law = masked_law("[abc][xyz]?", texts, 2.0)
    assert sum(law.values()) == pytest.approx(1, abs=1e-4)
    likely = dict.fromkeys([*map(ord, "abcxyz"), *ENDS], 6.0)  # so that the drafter draws them
    params = SamplingParams(regex="[abc][xyz]?", temperature=2.0, n=2000, max_new_tokens=4, logit_bias=likely)
    found = Counter(
        output.text for output in engine_of(drafter.format(**folders), rule=rule).generate(PROMPTS[0], params)
    )
    assert scipy.stats.chisquare([found[text] for text in texts], [2000 * law[text] for text in texts]).pvalue > 1e-3


@pytest.mark.full
@pytest.mark.statistics
@sampled
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_forbidden_ends_leave_the_law_of_a_rule_as_it_is(folders, rule, drafter):
    """Two tokens must come before an end, which the drafter proposes everywhere."""
    letters = [*map(ord, "ab")]
    likely = {**dict.fromkeys(letters, 40.0), **dict.fromkeys(ENDS, 40.0)}
    params = SamplingParams(temperature=4.0, n=2000, max_new_tokens=3, min_tokens=2, logit_bias=likely)
    plain, found = (
        Counter(tuple(output.token_ids) for output in engine.generate(PROMPTS[0], params))
        for engine in (engine_of(), engine_of(drafter.format(**folders), rule=rule))
    )
    assert all(not ENDS & {*ids[:2]} for ids in found)
    common = [key for key, count in (plain + found).items() if count >= 20]
    table = [[counts[key] for key in common] for counts in (plain, found)]
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.full
def test_random_requests_equal_plain_ones(folders):
    rng = random.Random(1)
    for name in SPECS:
        engine = engine_of(SPECS[name].format(**folders), max_batch_size=rng.choice((1, 4, 16)))
        params = [rng.choice(params_of(rng.choice((0, 0.8, 1.2)))) for _ in range(12)]
        params = [dataclasses.replace(own, seed=rng.randrange(99)) for own in params]
        prompts = [rng.choice(PROMPTS) for _ in params]
        assert ids(engine.generate(prompts, params)) == ids(plain_outputs(prompts, params))


def test_choices_and_regexes_of_the_module_are_met_by_plain_decoding():
    assert re.fullmatch(REGEX, "aa is 3 years old.") and not re.fullmatch(REGEX, "aa is 3 years old")
