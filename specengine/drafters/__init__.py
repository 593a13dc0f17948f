"""Drafters by name."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from specengine.drafters.base import Drafter
from specengine.drafters.shipped import shipped
from specengine.rules.base import Rule, Wants
from specengine.utils.spec_string import Spec

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer

__all__ = ["Drafter", "best_drafter", "check_chains", "check_offers", "drafter_kind", "drafter_names", "load_drafter"]

# Name -> module and class. A name may be written with - for _.
DRAFTERS = {
    "combine": "combine:Combine",
    "draft_model": "draft_model.drafter:DraftModel",
    "eagle": "eagle.eagle:Eagle1",
    "eagle3": "eagle.eagle3:Eagle3",
    "fasteagle": "fasteagle.drafter:FastEagle",
    "glide": "glide.drafter:Glide",
    "lookahead": "lookahead.drafter:Lookahead",
    "medusa": "medusa:Medusa",
    "none": "none:NoneDrafter",
    "ouroboros": "ouroboros.drafter:Ouroboros",
    "prompt_lookup": "prompt_lookup:PromptLookup",
    "suffix": "suffix.drafter:Suffix",
}

# What `auto` looks for among the drafters that come with the package, best first, and how it drafts on the CPU: a pass
# there waits for memory, the drafter's no less than the target's, so its weights are small and its trees narrow.
TRAINED = {"eagle3": ";levels=5;top_k=4;beam=1;dtype=int4", "fasteagle": ";dtype=int4"}


def drafter_names() -> list[str]:
    """Names of all drafters."""
    return sorted(DRAFTERS)


def load_drafter(text: str, target: Transformer) -> Drafter:
    """The drafter that `NAME[:PATH][,option=value...]` describes, for a target; `auto` picks the best available.

    Raises ValueError for an unknown name or option, or a drafter that does not fit the target; FileNotFoundError.
    """
    spec = Spec.parse(text, "drafter")
    if spec.name == "auto":
        if spec.path is not None:
            raise ValueError(f"drafter: auto takes no path, got {text!r}")
        best = best_drafter(target)
        spec = replace(spec, name=best.name, path=best.path)
    kind = drafter_kind(spec.name)
    if spec.path is not None and not kind.takes_path:
        raise ValueError(f"drafter: {kind.name} takes no path, got {text!r}")
    config = spec.build(kind.config_type, "drafter")
    try:
        return kind(config, spec.path, target)
    except (FileNotFoundError, ValueError) as error:  # of its files: not to be taken for the target's
        if str(error).startswith("drafter: "):
            raise
        missing = isinstance(error, FileNotFoundError)
        raise (FileNotFoundError if missing else ValueError)(f"drafter: {error}") from error


def best_drafter(target: Transformer) -> Spec:
    """What `auto` is for a target: copies, of a corpus too, and drafts of a trained drafter, where they come with the
    package."""
    copies = "suffix" if shipped("suffix", target) and not target.ops.resident else "prompt_lookup"
    name = next((name for name in TRAINED if shipped(name, target)), None)
    if name is None:
        return Spec(copies, None, {})
    if target.ops.resident:  # a combination would draft between two captured cycles
        return Spec(name, None, {})
    return Spec("combine", f"{copies}+{name}{TRAINED[name]}", {})


def check_offers(drafter: Drafter, rule: str, wants: Wants) -> None:
    """Raises ValueError where a drafter cannot serve a rule."""
    if wants not in drafter.offers:
        able = ", ".join(name for name in drafter_names() if wants in drafter_kind(name).offers)
        needs = "draft logits" if wants is Wants.PROBABILITIES else "children sampled from draft logits"
        raise ValueError(
            f"rule: {rule} needs {needs}, which drafter {drafter.name} does not give; drafters that do: {able}"
        )


def check_chains(drafter: Drafter, rule: Rule) -> None:
    """Raises ValueError where a rule that takes chains only would meet trees."""
    if rule.chains_only and not drafter.drafts_chains:
        raise ValueError(
            f"rule: {rule.name} takes chains only, and drafter {drafter.name} as configured drafts trees; chains are "
            "drafted by draft-model without tree, fasteagle, eagle and eagle3 with top_k=1 and glide with cape=false; "
            "rule traversal takes trees"
        )


def drafter_kind(name: str) -> type[Drafter]:
    """The class of a drafter. Raises ValueError where none has this name."""
    key = name.replace("-", "_")
    if key not in DRAFTERS:
        raise ValueError(f"drafter: expected auto or one of {', '.join(drafter_names())}, got {name!r}")
    module, _, kind = DRAFTERS[key].partition(":")
    return getattr(importlib.import_module(f"specengine.drafters.{module}"), kind)
