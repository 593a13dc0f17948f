"""Every drafter under every rule: each cell of the table in docs/README.md runs, or is refused as the table says."""

import json
from dataclasses import replace

import pytest
import torch

from specengine import Engine
from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.shapes import Ranks
from specengine.drafters import drafter_names
from specengine.rules import RULES, Wants
from specengine.utils.spec_string import Spec
from tests.docs.pages import ROOT, Page
from tests.drafters.table_drafter import Table
from tests.drafters.trained_files import TRAINED, write_trained
from tests.engines import GREEDY, SAMPLED, ids, tiny_engine

pytestmark = pytest.mark.filterwarnings("ignore:drafter")

TABLE = Page(ROOT / "docs" / "README.md").rows("### Drafters under rules")
COLUMNS = (
    ("match", "typical", "margin"),
    ("rejection", "traversal"),
    ("block",),
    ("cascade", "bild", "lossy"),
    ("margin:reference",),
)
CELLS = {
    (row[0].strip("`").replace("-", "_"), rule): cell
    for row in TABLE
    for rules, cell in zip(COLUMNS, row[1:], strict=True)
    for rule in rules
}
PROMPTS = [[5, 9, 13, 5, 9, 13, 5, 9], [40, 41, 42, 43, 41, 42], [7]]
GREEDY, SAMPLED = (replace(params, max_new_tokens=12) for params in (GREEDY, SAMPLED))
LOSSLESS = ("rejection", "traversal", "block")
QUICK = {("fasteagle", "cascade"), ("glide", "block"), ("eagle3", "rejection"), ("suffix", "lossy")}
SMALL = {  # trees of these options are small
    "prompt_lookup": "prompt_lookup",
    "suffix": "suffix,corpus=false",
    "lookahead": "lookahead,window=3,ngram=3",
    "ouroboros": "ouroboros:self,layers=1,length=3,window=3,ngram=3",
    "draft_model": "draft-model:self,layers=1,length=3",
    "none": "none",
    "dflash": "nodes=41,top_k=8",
    "domino": "nodes=41,top_k=8",
    "dspark": "nodes=49,top_k=8",
    "jetspec": "nodes=41,top_k=8",
    "eagle": "nodes=12,levels=3,top_k=3",
    "eagle3": "nodes=12,levels=3,top_k=3",
    "mtp": "nodes=12,levels=3,top_k=3",
    "fasteagle": "top_k=3",
    "medusa": "nodes=12",
    "glide": "length=3",
    "p_eagle": "length=3,nodes=12",
    "pard": "length=3,nodes=12",
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """Specs of drafters that draft in every cycle, by name."""
    paths = write_trained(tmp_path_factory.mktemp("trained"))
    found = {name: f"{paths[name]},{own}" if name in paths else own for name, own in SMALL.items()}
    part = found["eagle3"].replace(",", ";")
    found["combine"] = f"combine:prompt_lookup+{part}"
    return {name: own if name == "none" else f"{own},adaptive=false" for name, own in found.items()}


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    file = tmp_path_factory.mktemp("chain") / "chain.json"
    file.write_text(json.dumps([[0], [0, 0], [0, 0, 0]]))
    return str(file)


def with_options(text: str, options: str) -> str:
    """The spec with some options instead of its own: `top_k=1,levels=3`."""
    spec = Spec.parse(text, "drafter")
    return str(replace(spec, options=spec.options | Spec.parse(f"none,{options}", "drafter").options))


def handed_over(engine: Engine) -> list[bool]:
    """Notes for each draft whether the rule gets distributions."""
    found: list[bool] = []
    drafter = engine.drafter
    if drafter.gives_logits(Wants.PROBABILITIES):
        draft = drafter.draft_for

        def noted(wants, requests):
            drawn = draft(wants, requests)
            found.append(drawn.logits is not None and bool((drawn.logits.rows >= 0).any()))
            return drawn

        drafter.draft_for = noted
    return found


def run(spec: str, rule: str) -> set[str]:
    """Runs a cell at two temperatures; returns how its children were proposed: certain, drawn or logits."""
    plain = ids(tiny_engine("none").generate(PROMPTS, GREEDY))
    engine = tiny_engine(spec, rule=rule)
    found = handed_over(engine)
    greedy, sampled = (engine.generate(PROMPTS, params) for params in (GREEDY, SAMPLED))
    assert [len(out.token_ids) for out in (*greedy, *sampled)] == [12] * 6
    assert (ids(greedy) == plain) or rule not in (*LOSSLESS, "match")
    assert all(out.stats.lossless == (rule in (*LOSSLESS, "match")) for out in sampled)
    assert engine.drafter.name == "none" or any(out.stats.acceptance_by_depth for out in (*greedy, *sampled))
    if not any(found):
        return {"certain"}
    return {"logits"} if engine.rule.wants is Wants.PROBABILITIES else {"drawn"}


def check(specs, chain: str, name: str, rule: str) -> None:
    """Runs a cell of the table."""
    cell, _, options = CELLS[name, rule].partition(" with ")
    spec = with_options(specs[name], options.strip("`").replace("CHAIN.json", chain)) if options else specs[name]
    if cell == "refused":
        needs = "takes chains only" if rule == "block" else "its nodes have no distribution"
        with pytest.raises(ValueError, match=rf"^rule: {rule.partition(':')[0]} .*{needs}"):
            tiny_engine(spec, rule=rule)
        return
    kinds = run(spec, rule)
    if " or " in cell:
        kinds |= run(f"{spec},sample=true", rule)
    assert kinds == set(cell.replace("any", "certain").split(" or "))


@pytest.mark.parametrize("name, rule", sorted(QUICK))
def test_a_drafter_serves_a_rule_as_the_table_says(specs, chain, name, rule):
    check(specs, chain, name, rule)


@pytest.mark.full
@pytest.mark.parametrize("name, rule", sorted(set(CELLS) - QUICK))
def test_every_drafter_serves_every_rule_as_the_table_says(specs, chain, name, rule):
    check(specs, chain, name, rule)


def test_the_table_has_every_drafter_and_every_rule():
    assert {name for name, _ in CELLS} == set(drafter_names())
    assert {rule for _, rule in CELLS} == {*RULES, "margin:reference"}


def test_a_cell_that_is_wrong_is_noticed(specs, chain, monkeypatch):
    monkeypatch.setitem(CELLS, ("prompt_lookup", "rejection"), "drawn")
    with pytest.raises(AssertionError):
        check(specs, chain, "prompt_lookup", "rejection")


@pytest.mark.parametrize("name", TRAINED)
def test_children_beside_their_probabilities_are_those_of_a_plain_draft(specs, name):
    fixed = {"eagle": "tree=eagle_25", "mtp": "tree=eagle_25", "eagle3": "top_k=1"}
    fixed |= dict.fromkeys(("p_eagle", "pard", "dflash", "domino", "dspark"), "tree=chain")
    spec = with_options(specs[name], fixed.get(name, "adaptive=false"))
    trees = []
    for wants in (Wants.NOTHING, Wants.PROBABILITIES):
        engine, own = tiny_engine(spec), []
        draft = engine.drafter.draft

        def noted(requests, wants=wants, drafter=engine.drafter, draft=draft, own=own):
            drafted = draft(requests) if wants is Wants.NOTHING else drafter.draft_for(wants, requests)
            own.append([paths(tree) for tree in drafted.trees])
            return drafted

        engine.drafter.draft = noted
        engine.generate(PROMPTS, GREEDY)
        trees.append(own)
    assert trees[0] == trees[1] and max(len(tree) for drafted in trees[0] for tree in drafted) > 3


def paths(tree) -> set[tuple[int, ...]]:
    """The tokens on the path of each node."""
    found = [(tree.tokens[0],)]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found)


def test_a_combination_refuses_a_part_that_draws(specs):
    part = specs["eagle3"].replace(",", ";")
    with pytest.raises(ValueError, match=r"^drafter: combine: eagle3 draws its children, as with sample=true"):
        tiny_engine(f"combine:prompt_lookup+{part};sample=true")


@pytest.mark.parametrize("rule", ["rejection", "traversal", "bild", "margin:reference"])
def test_a_new_drafter_serves_rules_by_its_logits_alone(rule):
    logits = torch.randn(320, 320, generator=torch.Generator().manual_seed(1))
    engine = tiny_engine(Table(logits, Ranks(RankTree.of_widths((2, 1)))), rule=rule)
    found = handed_over(engine)
    plain = ids(tiny_engine("none").generate(PROMPTS, GREEDY))
    assert ids(engine.generate(PROMPTS, GREEDY)) == plain or rule not in LOSSLESS
    assert any(out.stats.acceptance_by_depth for out in engine.generate(PROMPTS, SAMPLED)) and any(found)


def texts(spec: str, rule: str, **options) -> list[list[int]]:
    return ids(tiny_engine(spec, rule=rule, **options).generate(PROMPTS, SAMPLED))


@pytest.mark.parametrize("name", TRAINED)
def test_drawn_children_are_fixed_by_the_seed_whoever_else_is_in_the_batch(specs, name):
    spec = f"{specs[name]},sample=true"
    alone = texts(spec, "rejection", max_batch_size=1)
    assert alone == texts(spec, "rejection", max_batch_size=8) != texts(specs[name], "rejection")


@pytest.mark.parametrize("name", TRAINED)
def test_a_lossy_rule_is_rejection_of_drawn_children_at_its_neutral_parameter(specs, name):
    drawn = texts(f"{specs[name]},sample=true", "rejection")
    assert texts(specs[name], "cascade:chow,alpha=-1") == drawn == texts(specs[name], "lossy:alpha=0")
    assert texts(specs[name], "lossy:alpha=1") != drawn


def test_prompts_are_read_for_drawn_trees_whatever_the_policy_says(specs, monkeypatch):
    monkeypatch.setattr("specengine.draft_policy.policy.DraftPolicy.reads", lambda *_: False)
    spec = with_options(specs["eagle3"], "adaptive=true")
    for rule, depths in (("cascade", 3), ("match", 0)):
        (output,) = tiny_engine(spec, rule=rule).generate(PROMPTS[:1], SAMPLED)
        assert len(output.stats.acceptance_by_depth) == depths
