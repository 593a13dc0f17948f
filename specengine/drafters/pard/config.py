"""The options of the drafter pard."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.drafters.one_pass.config import OnePassConfig


@dataclass(frozen=True)
class Config(OnePassConfig):
    """The options, beside those of other drafters of one pass.

    features: whether the target's hidden states are read where the checkpoint was trained with them (PARD-2).
    """

    features: bool = True
