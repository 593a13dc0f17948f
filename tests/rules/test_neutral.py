"""On the real model, every lossy rule at its neutral parameter gives the text of its exact rule."""

import json

import pytest

from specengine import Engine, SamplingParams
from specengine.rules import Wants, parse_rule
from specengine.rules.margin import Margin
from specengine.tensor_parallel.loading import load_model
from tests.data.questions import DATA
from tests.rules.lossy import IDS, LOSSY

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTIONS = [json.loads(line)["turns"][0] for line in (DATA / "questions.jsonl").read_text().splitlines()][:20]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=32),
    "sampled": SamplingParams(max_new_tokens=32, temperature=0.8, top_p=0.95, seed=7),
}
DRAFTERS = {Wants.NOTHING: "prompt_lookup", Wants.SAMPLED_ONLY: "draft-model:self,layers=24,length=3"}


@pytest.fixture(scope="module")
def answers(smollm2_path):
    model, kept = load_model(smollm2_path, device="cpu"), {}

    def answer(rule, drafter: str, params: str) -> list[list[int]]:
        key = (rule, drafter, params)
        if key not in kept:
            engine = Engine(model, drafter=drafter, rule=rule)
            prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
            kept[key] = [output.token_ids for output in engine.generate(prompts, PARAMS[params])]
        return kept[key]

    return answer


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("rule", LOSSY, ids=IDS)
def test_the_neutral_parameter_equals_the_exact_rule_on_twenty_prompts(answers, rule, params):
    if isinstance(rule, Margin) and rule.mode == "strict" and params == "sampled":
        pytest.skip("never samples: its neutral parameter is greedy decoding")
    drafter = DRAFTERS[rule.wants]
    exact = parse_rule("match" if rule.wants is Wants.NOTHING else "rejection")
    assert answers(rule.neutral, drafter, params) == answers(exact, drafter, params)


def test_a_rule_at_other_parameters_gives_another_text(answers):
    loose, exact = parse_rule("lossy:alpha=0.9"), parse_rule("rejection")
    drafter = DRAFTERS[Wants.SAMPLED_ONLY]
    assert answers(loose, drafter, "sampled") != answers(exact, drafter, "sampled")
