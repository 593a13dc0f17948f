"""The types of parameters, read from unchecked schemas."""

import pytest

from specengine.tool_calls.parameter_types import parameter_types, typed_value


def schema_of(own, **more) -> dict:
    return {"type": "object", "properties": {"a": own}, **more}


@pytest.mark.parametrize("own", [5, [], {"anyOf": 5}, {"enum": 5}, {"oneOf": {"type": "integer"}}, {"$ref": "#/x/y"}])
def test_a_schema_that_is_none_says_nothing(own):
    assert parameter_types(schema_of(own), "a") == set()
    assert typed_value(schema_of(own), "a", "word") == '"word"'


def test_a_union_that_refers_to_itself_is_followed_once():
    """Followed each time, 3,000 references take years."""
    union = {"anyOf": [{"$ref": "#/$defs/x"}] * 3000 + [{"type": "integer"}]}
    schema = schema_of({"$ref": "#/$defs/x"}, **{"$defs": {"x": union}})
    assert parameter_types(schema, "a") == {"integer"}


def test_a_number_without_a_fraction_is_an_integer_and_another_one_is_text():
    schema = schema_of({"type": "integer"})
    assert typed_value(schema, "a", "3.0") == "3.0"
    assert typed_value(schema, "a", "3.5") == '"3.5"'
