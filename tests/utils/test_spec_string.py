from dataclasses import dataclass

import pytest

from specengine.utils.spec_string import Spec, check_range


@dataclass(frozen=True)
class Config:
    nodes: int = 4
    scale: float = 0.5
    fast: bool = False

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 1, 9)


def test_a_spec_is_a_name_a_path_and_options():
    spec = Spec.parse("eagle3:/some/dir:x,nodes=7, scale=0.25,fast=true", "drafter")
    assert (spec.name, spec.path) == ("eagle3", "/some/dir:x")
    assert spec.build(Config, "drafter") == Config(7, 0.25, True)
    assert Spec.parse("none", "drafter").build(Config, "drafter") == Config()
    assert str(spec) == "eagle3:/some/dir:x,nodes=7,scale=0.25,fast=true"
    assert str(Spec.parse("none, nodes=2", "drafter")) == "none,nodes=2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "drafter: expected NAME"),
        (None, "drafter: expected NAME"),
        ("x,", "expected option=value"),
        ("x,nodes", "expected option=value"),
        ("x,nodes=", "expected option=value"),
        ("x,nodes=1,nodes=2", "given twice"),
        ("x,size=1", "no option 'size'; its options: fast, nodes, scale"),
        ("x,nodes=many", "nodes: expected int"),
        ("x,fast=1", "fast: expected true or false"),
        ("x,nodes=10", "nodes: expected an integer from 1 to 9"),
    ],
)
def test_a_malformed_spec_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        Spec.parse(text, "drafter").build(Config, "drafter")
