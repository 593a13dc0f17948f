"""The trainable drafters, by their names in --drafter."""

from __future__ import annotations

from importlib import import_module

from specengine.train.objectives.base import Objective
from specengine.train.objectives.target_weights import TargetWeights
from specengine.utils.spec_string import Spec

# name -> module:class, in this folder, imported on first use; or a class from elsewhere
OBJECTIVES: dict[str, str | type[Objective]] = {
    "dflash": "block_families:DFlashObjective",
    "draft-model": "draft_model:DraftModelObjective",
    "dspark": "block_families:DSparkObjective",
    "eagle": "eagle:EagleObjective",
    "eagle3": "eagle3:Eagle3Objective",
    "fasteagle": "fasteagle:FastEagleObjective",
    "glide": "glide:GlideObjective",
    "jetspec": "block_families:JetSpecObjective",
    "medusa": "medusa:MedusaObjective",
}


def objective_class(text: str) -> tuple[type[Objective], object]:
    """Returns the class and the options of `NAME[,option=value...]`. Raises ValueError for an unknown one."""
    spec = Spec.parse(text, "drafter")
    if spec.name not in OBJECTIVES:
        raise ValueError(f"drafter: {spec.name!r} cannot be trained, expected one of {', '.join(sorted(OBJECTIVES))}")
    if spec.path is not None:
        raise ValueError(f"drafter: a drafter to train has no path, got {text!r}")
    kind = OBJECTIVES[spec.name]
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
        kind = getattr(import_module(f"specengine.train.objectives.{module}"), name)
    return kind, spec.build(kind.options_type, "drafter")


def new_objective(text: str, target: TargetWeights) -> Objective:
    """Makes the objective of a spec, with its network at its start. Raises ValueError as objective_class()."""
    kind, options = objective_class(text)
    return kind(target, options)
