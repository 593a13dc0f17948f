"""Drafters by name.

To add one, write its module in this folder, and one line in DRAFTERS.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from specengine.drafters.drafter import Drafter
from specengine.drafters.mtp.checkpoint import has_mtp
from specengine.drafters.shipped import shipped_folder
from specengine.rules.base import Rule, Wants
from specengine.utils.spec_string import Spec

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer

__all__ = [
    "Drafter",
    "best_drafter",
    "check_chains",
    "check_offers",
    "drafter_kind",
    "drafter_names",
    "load_drafter",
]

# Drafter.name -> module:class, in this folder; or a class from elsewhere. Users may write - for _.
DRAFTERS: dict[str, str | type[Drafter]] = {
    "combine": "combine.drafter:Combine",
    "dflash": "block.drafter:DFlash",
    "domino": "block.drafter:Domino",
    "draft_model": "draft_model.drafter:DraftModel",
    "dspark": "block.drafter:DSpark",
    "eagle": "eagle.drafter:Eagle1",
    "eagle3": "eagle.drafter:Eagle3",
    "fasteagle": "fasteagle.drafter:FastEagle",
    "glide": "glide.drafter:Glide",
    "jetspec": "block.drafter:JetSpec",
    "lookahead": "lookahead.drafter:Lookahead",
    "medusa": "medusa.drafter:Medusa",
    "mtp": "mtp.drafter:Mtp",
    "none": "none:NoneDrafter",
    "ouroboros": "ouroboros.drafter:Ouroboros",
    "p_eagle": "p_eagle.drafter:PEagle",
    "pard": "pard.drafter:Pard",
    "prompt_lookup": "prompt_lookup.drafter:PromptLookup",
    "suffix": "suffix.drafter:Suffix",
}

# The trained drafters that `auto` looks for in the package, best first.
TRAINED = ("eagle3", "fasteagle")


def drafter_names() -> list[str]:
    """Returns the names of all drafters."""
    return sorted(DRAFTERS)


def load_drafter(text: str, target: Transformer) -> Drafter:
    """Loads the drafter that `NAME[:PATH][,option=value...]` describes; `auto` picks the best available.

    Raises FileNotFoundError, and ValueError for an unknown name or option or a drafter that does not fit the target.
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
    except (
        FileNotFoundError,
        ValueError,
    ) as error:  # of its files: the message must not sound as if they were the target's
        if str(error).startswith("drafter: "):
            raise
        missing = isinstance(error, FileNotFoundError)
        raise (FileNotFoundError if missing else ValueError)(f"drafter: {error}") from error


def best_drafter(target: Transformer) -> Spec:
    """Returns what `auto` stands for: copies of the text or of a shipped corpus, and a trained drafter.

    The drafter is the one in the target's own checkpoint, else one that comes with the package.
    """
    copies = "suffix" if shipped_folder("suffix", target) and not target.ops.on_device else "prompt_lookup"
    name = "mtp" if has_mtp(target) else next((name for name in TRAINED if shipped_folder(name, target)), None)
    if name is None:
        return Spec(copies, None, {})
    return Spec("combine", f"{copies}+{name}", {})


def check_offers(drafter: Drafter, rule: str, wants: Wants) -> None:
    """Raises ValueError where a drafter cannot serve a rule."""
    if wants not in drafter.offers:
        able = ", ".join(name for name in drafter_names() if wants in drafter_kind(name).offers)
        needs = "draft logits" if wants is Wants.PROBABILITIES else "children sampled from draft logits"
        raise ValueError(
            f"rule: {rule} needs {needs}, which drafter {drafter.name} does not give, because its nodes have no "
            f"distribution; drafters that do: {able}"
        )


def check_chains(drafter: Drafter, rule: Rule) -> None:
    """Raises ValueError where a rule that takes chains only would meet trees."""
    if rule.chains_only and not drafter.drafts_chains:
        raise ValueError(
            f"rule: {rule.name} takes chains only, and drafter {drafter.name} as configured drafts trees; chains are "
            "drafted by draft-model without tree, fasteagle, eagle, eagle3 and mtp with top_k=1, medusa with a tree "
            "of one path, dflash, jetspec, dspark, domino, p-eagle and pard with tree=chain and glide with cape=false; "
            "rule traversal takes trees"
        )


def drafter_kind(name: str) -> type[Drafter]:
    """Returns the class of a drafter. Raises ValueError for an unknown name."""
    key = name.replace("-", "_")
    if key not in DRAFTERS:
        raise ValueError(f"drafter: expected auto or one of {', '.join(drafter_names())}, got {name!r}")
    if not isinstance(place := DRAFTERS[key], str):
        return place
    module, _, kind = place.partition(":")
    return getattr(importlib.import_module(f"specengine.drafters.{module}"), kind)
