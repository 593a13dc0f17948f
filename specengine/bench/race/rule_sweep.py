"""`--rules`: splits a list of rules, and chooses the drafter that each rule is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from specengine.bench.race.contenders import BASE, CONTROL, PLAIN, Contender
from specengine.bench.race.sequential import is_sequential
from specengine.drafters import Drafter, check_chains, check_offers, load_drafter
from specengine.models.transformer import Transformer
from specengine.rules import Rule, Wants, parse_rule

EXACT = {Wants.NOTHING: "match"}  # every other rule: `rejection`


def split_rules(text: str) -> list[str]:
    """Splits rules at spaces, and makes one rule of each value between slashes.

    `margin:theta=0.84/0.9 cascade:chow/opt,alpha=0.1` is `margin:theta=0.84`, `margin:theta=0.9`,
    `cascade:chow,alpha=0.1` and `cascade:opt,alpha=0.1`. Raises ValueError for an empty list.
    """
    rules: list[str] = []
    for item in text.split():
        name, colon, options = item.partition(":")
        choices = []
        for option in options.split(","):
            key, equals, values = option.rpartition("=")
            choices.append([f"{key}{equals}{value}" for value in values.split("/")])
        rules += [name + colon + ",".join(chosen) for chosen in product(*choices)]
    if not rules:
        raise ValueError(f"rules: expected rules separated by spaces, got {text!r}")
    return list(dict.fromkeys(rules))


def family(rule: str) -> str:
    """Returns a rule's description without its numbers, which is the same for all rules of a sweep."""
    return ":".join([rule.partition(":")[0], *(value for value in _values(rule) if not _is_number(value))])


def numbers(rule: str) -> str:
    """Returns the numbers of a rule's description, as `0.9` or `0.09,0.3`."""
    return ",".join(value for value in _values(rule) if _is_number(value))


def _values(rule: str) -> list[str]:
    options = rule.partition(":")[2]
    return [option.rpartition("=")[2].strip() for option in options.split(",")] if options else []


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def rule_contenders(rules: Sequence[str], drafters: Sequence[str], target: Transformer) -> list[Contender]:
    """Returns plain decoding, every rule, and the exact rule that each is compared with.

    A rule that reads a draft distribution gets the first drafter with a true distribution. Without such a drafter, and
    for other rules, it gets the first drafter that serves it; `none` and `control` are never chosen.
    Raises ValueError for a rule that no drafter serves.
    """
    named = [(name, load_drafter(name, target)) for name in drafters if name not in (BASE, CONTROL)]
    contenders = [PLAIN]
    for text in rules:
        rule = None if is_sequential(text) else parse_rule(text)
        drafter = _drafter_of(rule, text, named)
        contenders += [Contender(drafter, exact_rule(rule))] if rule else []
        contenders.append(Contender(drafter, text))
    return list(dict.fromkeys(contenders))


def exact_rule(rule: Rule) -> str:
    """Returns the exact rule whose output a lossy rule approximates."""
    return EXACT.get(rule.wants, "rejection")


def exact_contender(drafter: str, rule: str) -> Contender:
    """Returns the contender whose output is the reference for another one; plain decoding for a sequential cascade."""
    return PLAIN if is_sequential(rule) else Contender(drafter, exact_rule(parse_rule(rule)))


def _drafter_of(rule: Rule | None, text: str, named: Sequence[tuple[str, Drafter]]) -> str:
    if rule is None:
        models = [name for name, drafter in named if drafter.name == "draft_model"]
        if not models:
            raise ValueError(f"rules: {text} needs draft-model among the drafters")
        return models[0]
    if not named:
        raise ValueError("rules: expected drafters beside none")
    able = [(name, drafter) for name, drafter in named if rule.wants in drafter.offers]
    if not able:
        check_offers(named[0][1], rule.name, rule.wants)
    fitting = [(name, drafter) for name, drafter in able if drafter.drafts_chains or not rule.chains_only]
    if not fitting:
        check_chains(able[0][1], rule)
    true = [
        name for name, drafter in fitting if Wants.SAMPLED_ONLY in drafter.offers and drafter.gives_logits(rule.wants)
    ]
    return true[0] if true and rule.wants is not Wants.NOTHING else fitting[0][0]
