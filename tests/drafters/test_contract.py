"""What every drafter keeps to, whatever it drafts."""

import dataclasses

import pytest

from specengine.drafters import DRAFTERS, drafter_kind
from specengine.drafters.drafter import Drafter
from specengine.rules.base import Wants


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_has_the_name_it_is_found_by_and_options_that_can_be_left_out(name):
    kind = drafter_kind(name)
    assert kind is drafter_kind(name.replace("_", "-"))
    assert issubclass(kind, Drafter) and kind.name == name
    assert dataclasses.is_dataclass(kind.config_type) and kind.config_type() == kind.config_type()


@pytest.mark.parametrize("name", DRAFTERS)
def test_only_a_drafter_with_distributions_serves_rules_that_refuse_to_go_without(name):
    kind = drafter_kind(name)
    assert kind.gives_logits is not Drafter.gives_logits or not kind.offers & {Wants.SAMPLED_ONLY, Wants.PROBABILITIES}
