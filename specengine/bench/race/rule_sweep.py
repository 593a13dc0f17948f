"""`--rules`: descriptions with several values, and the drafter that each rule is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from specengine.bench.race.contenders import CONTROL
from specengine.bench.race.run import BASE
from specengine.bench.race.sequential import is_sequential
from specengine.drafters import Drafter, check_chains, check_offers, load_drafter
from specengine.models.transformer import Transformer
from specengine.rules import Rule, Wants, parse_rule

EXACT = {Wants.NOTHING: "match"}  # else `rejection`


def split_rules(text: str) -> list[str]:
    """Rules separated by spaces; values separated by slashes stand for one rule each.

    `margin:theta=0.84/0.9 cascade:chow/opt,alpha=0.1` is `margin:theta=0.84`, `margin:theta=0.9`,
    `cascade:chow,alpha=0.1` and `cascade:opt,alpha=0.1`. Raises ValueError for a list of none.
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
    """A rule's description without its numbers: what a sweep goes through."""
    return ":".join([rule.partition(":")[0], *(value for value in _values(rule) if not _is_number(value))])


def numbers(rule: str) -> str:
    """The numbers of a description, as `0.9` or `0.09,0.3`."""
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


def race(rules: Sequence[str], drafters: Sequence[str], target: Transformer) -> list[tuple[str, str]]:
    """(drafter, rule) of every contender: the base, each rule, and the exact rule that each leans on.

    A rule that wants a draft distribution gets the first drafter that has a true one, else and if it wants nothing the
    first that serves it; `none` and `control` do not count. Raises ValueError for a rule that no drafter serves.
    """
    named = [(name, load_drafter(name, target)) for name in drafters if name not in (BASE, CONTROL)]
    pairs = [(BASE, "match")]
    for text in rules:
        rule = None if is_sequential(text) else parse_rule(text)
        drafter = _drafter_of(rule, text, named)
        pairs += [(drafter, exact_rule(rule)), (drafter, text)] if rule else [(drafter, text)]
    return list(dict.fromkeys(pairs))


def exact_rule(rule: Rule) -> str:
    """The rule whose output a lossy one approaches."""
    return EXACT.get(rule.wants, "rejection")


def exact_pair(drafter: str, rule: str) -> tuple[str, str]:
    """The contender whose output that of another is compared with; plain decoding for a sequential cascade."""
    return (BASE, "match") if is_sequential(rule) else (drafter, exact_rule(parse_rule(rule)))


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
    true = [name for name, drafter in fitting if Wants.SAMPLED_ONLY in drafter.offers]
    return true[0] if true and rule.wants is not Wants.NOTHING else fitting[0][0]
