"""Verification rules by name, with their parameters and guarantees; csrc/rules holds the arithmetic."""

from __future__ import annotations

from dataclasses import fields

from specengine.rules.base import Rule, Wants
from specengine.rules.cascade import Bild, Cascade, Lossy
from specengine.rules.lossless import Block, Match, Rejection, Traversal
from specengine.rules.margin import Margin
from specengine.rules.typical import Typical
from specengine.utils.spec_string import Spec

__all__ = ["RULES", "Rule", "Wants", "parse_rule"]

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Match, Rejection, Block, Traversal, Margin, Typical, Cascade, Bild, Lossy)
}


def parse_rule(spec: str | Rule) -> Rule:
    """Parses `NAME[:option=value,...]`, such as `margin:theta=0.9` or `cascade:opt,alpha=0.1`; returns a Rule as it is.

    Raises ValueError for an unknown rule, option or value; the message lists the known ones.
    """
    if isinstance(spec, Rule):
        return spec
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"rule: expected NAME[:option=value,...] or a Rule, got {spec!r}")
    name, _, options = (part.strip() for part in spec.partition(":"))
    if name not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {spec!r}")
    kind = RULES[name]
    items = [item.strip() for item in options.split(",")] if options else []
    if items and "=" not in items[0]:
        if kind.positional is None:
            known = ", ".join(field.name for field in fields(kind)) or "none"
            raise ValueError(f"rule: expected option=value, got {items[0]!r} in {spec!r}; options of {name}: {known}")
        items[0] = f"{kind.positional}={items[0]}"
    return Spec.parse(",".join([name, *items]), "rule").build(kind, "rule")
