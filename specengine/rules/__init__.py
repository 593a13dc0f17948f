"""Verification rules by name: parameters and guarantees; the arithmetic is in csrc/rules."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.options import Spec
from specengine.rules.base import Wants


@dataclass(frozen=True)
class Match:
    """Follow the tree while it holds the token the target itself draws (plain argmax at temperature 0).

    Guarantee: lossless; the same seed gives the same tokens with any drafter, any tree, or none.
    Needs nothing of the drafter. Parameters: none.
    """

    name = "match"
    wants = Wants.NOTHING


RULES = {"match": Match}


def parse_rule(text: str) -> Match:
    """The rule a spec names. Raises ValueError for an unknown rule or option."""
    spec = Spec.parse(text, "rule")
    if spec.name not in RULES or spec.path is not None:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {text!r}")
    return spec.build(RULES[spec.name], "rule")
