"""The drafters that can be trained, by the name --drafter gives."""

from __future__ import annotations

from importlib import import_module

from specengine.options import Spec
from specengine.train.objective import Frozen, Objective

OBJECTIVES = {
    "draft-model": ("specengine.train.draft_model", "DraftModelObjective"),
    "eagle": ("specengine.train.eagle", "EagleObjective"),
    "eagle3": ("specengine.train.eagle3", "Eagle3Objective"),
    "fasteagle": ("specengine.train.fasteagle", "FastEagleObjective"),
    "glide": ("specengine.train.glide", "GlideObjective"),
    "medusa": ("specengine.train.medusa", "MedusaObjective"),
}


def objective_class(text: str) -> tuple[type[Objective], object]:
    """The class, and its options, of `NAME[,option=value...]`. Raises ValueError for what is unknown."""
    spec = Spec.parse(text, "drafter")
    if spec.name not in OBJECTIVES:
        raise ValueError(f"drafter: {spec.name!r} cannot be trained, expected one of {', '.join(sorted(OBJECTIVES))}")
    if spec.path is not None:
        raise ValueError(f"drafter: a drafter to train has no path, got {text!r}")
    module, name = OBJECTIVES[spec.name]
    kind = getattr(import_module(module), name)
    return kind, spec.build(kind.options_type, "drafter")


def new_objective(text: str, frozen: Frozen) -> Objective:
    """The objective of a spec, its network at its start. Raises ValueError."""
    kind, options = objective_class(text)
    return kind(frozen, options)
