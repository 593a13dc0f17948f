import pytest

from specengine import SamplingParams
from specengine.engine.request import Request
from tests.engines import tiny_engine

SPECS = ("prompt_lookup", "suffix,remember=100", "lookahead", "ouroboros:self,layers=1", "draft-model:self,layers=1")


@pytest.mark.parametrize("spec", [*SPECS, "combine:prompt_lookup+suffix"])
def test_nothing_is_kept_of_a_sequence_that_is_over(spec):
    """A call of thousands of prompts holds them all to its end."""
    core = tiny_engine(spec).core
    request = Request([5, 9, 13, 5, 9], SamplingParams(), 0, 48, frozenset(), None)
    core.drafter.draft([request])
    assert request.drafter_states
    core.release([request])
    assert not request.drafter_states
