"""Schemas as the grammar engine gets them: what it cannot hold is refused by name or left out, objects are closed."""

import random
import time

import pytest

from specengine import SamplingParams
from specengine.constraints.schemas import fit_schema
from tests.constraints.schema_fuzz import SchemaFuzz, takes
from tests.constraints.vocabulary import grammars
from tests.selection import looped

N = {"type": "integer"}
SHARED = grammars()


def takes_text(schema, text: str) -> bool:
    return takes(SHARED.constraint(SamplingParams(json_schema=schema))._start, text)


def properties(**named) -> dict:
    return {"type": "object", "properties": named}


def deep(levels: int, key: str) -> dict:
    schema: dict = N
    for _ in range(levels):
        schema = properties(a=schema) if key == "properties" else {key: schema}
    return schema


def left_out(schema: dict, coverage="lenient") -> dict:
    return {key: value for key, value in fit_schema(schema, "x", coverage).items() if key != "x-guidance"}


LACKING = {
    "look-ahead": ({"type": "string", "pattern": "^(?!a)", "maxLength": 3}, "pattern", "look-ahead"),
    "look-behind": ({"type": "string", "pattern": "(?<=a)b"}, "pattern", "look-behind"),
    "back reference": ({"type": "string", "pattern": r"(a)\1"}, "pattern", "backreferences"),
    "boundary of words": ({"type": "string", "pattern": r"\ba"}, "pattern", "WordUnicode"),
    "bound of 64 bits": (N | {"minimum": 0, "maximum": 2**63 - 1}, "maximum", "round"),
    "bound beyond doubles": ({"type": "number", "maximum": 2**53 + 1}, "maximum", "round"),
    "exclusive bound beyond doubles": (N | {"exclusiveMinimum": 2**53}, "exclusiveMinimum", "round"),
    "bound of a double": ({"type": "number", "maximum": 1.7976931348623157e308}, "maximum", "round"),
    "bound of 400 digits": (N | {"minimum": 10**400}, "minimum", "round"),
    "open range below one": ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum", "exclude"),
    "constant beyond doubles": ({"const": 2**53 + 1}, "const", "round"),
    "infinite constant": ({"enum": [1, [float("inf")]]}, "enum", "round"),
    "many states": (N | {"multipleOf": 100000}, "multipleOf", "10000"),
    "long strings": ({"type": "string", "maxLength": 2**53}, "maxLength", "decimal literal"),
    "remote reference": ({"$ref": "https://example.org/x"}, "$ref", "registry"),
    "reference to nothing": ({"$ref": "#/$defs/x"}, "$ref", "does not exist"),
    "counted open keys": ({"additionalProperties": N, "minProperties": 2}, "minProperties", "may repeat"),
    "counted keys of patterns": (
        {"patternProperties": {"^a": N}, "additionalProperties": False, "minProperties": 2},
        "minProperties",
        "may repeat",
    ),
    "overlapping patterns": ({"patternProperties": {"^a": N, "b$": N}}, "patternProperties", "not disjoint"),
    "no such type": ({"type": "strin", "minLength": 1}, "type", "strin"),
}


@looped("case", LACKING)
def test_a_value_that_the_engine_lacks_is_refused_by_name_or_left_out_alone(case):
    schema, key, reason = LACKING[case]
    for place, whole in (("", schema), ("/properties/k", properties(k=schema)), ("/anyOf/0", {"anyOf": [schema, N]})):
        for coverage in ("strict", "whole"):
            with pytest.raises(ValueError) as refused:
                fit_schema(whole, "field", coverage)
            assert str(refused.value).startswith(f"field: {place}/{key}: ") and reason in str(refused.value)
    rest = {other: value for other, value in schema.items() if other != key}
    assert left_out(schema) == rest and left_out(properties(k=schema)) == properties(k=rest)


@looped(
    "key, value", [("not", N), ("if", N), ("uniqueItems", True), ("propertyNames", {"pattern": "^a"}), ("contains", N)]
)
def test_a_keyword_that_the_engine_lacks_is_refused_by_name_or_ignored(key, value):
    schema = {"type": ["object", "array"], key: value, **({"then": N} if key == "if" else {})}
    with pytest.raises(ValueError, match=rf"^x: /properties/k/{key}: .*{key}"):
        fit_schema(properties(k=schema), "x")
    assert takes_text(fit_schema(schema, "x", "lenient"), "[1, 1]")


def test_a_number_of_optional_keys_is_refused_also_where_schemas_are_joined():
    for schema in (
        properties(a=N, b=N) | {"minProperties": 1},
        {"allOf": [{"minProperties": 1}, properties(a=N, b=N)]},
    ):
        with pytest.raises(ValueError, match=r"^x: /.*: min/maxProperties"):
            fit_schema(schema, "x")
        assert takes_text(fit_schema(schema, "x", "lenient"), '{"b": 1}')
    assert takes_text(fit_schema(properties(a=N, b=N) | {"minProperties": 1}, "x", closed=True), '{"b": 1}')


IDLE = (
    *({"propertyNames": {"type": "string"}}, {"propertyNames": {"title": "any"}}, {"propertyNames": True}),
    *({"uniqueItems": False}, {"not": False}, {"unevaluatedProperties": True}, {"unevaluatedItems": {}}),
    *({"dependentRequired": {}}, {"dependentSchemas": {"a": True}}, {"then": N}, {"if": N}, {"minContains": 3}),
    *({"maximum": float("inf")}, {"exclusiveMinimum": float("-inf")}, {"$dynamicAnchor": "x"}),
    *({"title": "x", "description": "%json", "default": [deep(200, "items")], "examples": [10**400]},),
)


@looped("idle", IDLE)
def test_keywords_that_every_value_fulfils_are_always_taken(idle):
    for coverage in ("strict", "whole", "lenient"):
        assert left_out(properties(k=N | idle), coverage) == properties(k=N)
    assert left_out({"type": "integer", "format": "int64", "minimum": 2.0}, "strict") == N | {"minimum": 2.0}
    assert left_out({"minItems": 2.0}, "strict") == {"minItems": 2}


def test_an_unknown_format_is_an_annotation_and_refused_by_name_under_strict():
    schema = properties(k={"type": "string", "format": "binary"}, d={"type": "string", "format": "date"})
    with pytest.raises(ValueError, match=r"^x: /properties/k/format: unknown format 'binary'"):
        fit_schema(schema, "x", "strict")
    assert (
        left_out(schema, "whole") == left_out(schema) == properties(k={"type": "string"}, d=schema["properties"]["d"])
    )
    assert takes_text({"type": "string", "format": "path"}, '"/x"')


@looped("key", ["properties", "items", "not", "anyOf"])
def test_deep_schemas_are_refused_or_cut(key):
    for levels in (130, 200):
        schema = deep(levels, key) if key != "anyOf" else {"anyOf": [deep(levels, "items")]}
        with pytest.raises(ValueError, match=r"^x: /.*deeply"):
            fit_schema(schema, "x")
        assert fit_schema(schema, "x", "lenient", closed=True)
    with pytest.raises(ValueError, match=r"^x: .*deeply"):
        fit_schema(deep(20000, "items"), "x", "lenient")


def test_a_long_chain_of_references_is_refused_before_it_overflows_the_engine_s_stack():
    for link in (lambda to: to, lambda to: properties(a=to), lambda to: {"type": "object", "allOf": [to]}):
        chain = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(3000)} | {"d3000": {"type": "object"}}
        with pytest.raises(ValueError, match=r"^x: .*400 levels deep"):
            fit_schema({"$ref": "#/$defs/d0", "$defs": chain}, "x", "lenient")
        short = {name: chain[name] for name in chain if int(name[1:]) > 2900}
        assert fit_schema({"$ref": "#/$defs/d2901", "$defs": short}, "x")


ONE_SPELLING = {
    "of a named key": (properties(n={"type": "string"}) | {"additionalProperties": N}, '{"n": "x", "\\u006e": 1}'),
    "of a named key with an escape": (
        properties(**{"\n": {"type": "string"}}) | {"additionalProperties": N},
        '{"\\u000a": 1}',
    ),
    "of a named key with DEL": (
        properties(**{"\x7f": {"type": "string"}}) | {"additionalProperties": N},
        '{"\\u007f": 1}',
    ),
    "of a key of a pattern": (
        {"patternProperties": {"^a": N}, "additionalProperties": {"type": "null"}},
        '{"\\u0061": null}',
    ),
    "of a required key": ({"type": "object", "required": ["n"], "minProperties": 2}, '{"n": 1, "\\u006e": 1}'),
    "of joined keys": ({"allOf": [properties(n=N), {"additionalProperties": True}]}, '{"n": 1, "\\u006e": "x"}'),
}


@looped("case", ONE_SPELLING)
def test_a_key_that_decides_about_its_value_has_one_spelling(case):
    schema, text = ONE_SPELLING[case]
    assert not takes_text(schema, text)
    own = {"x-guidance": {"json_allow_general_unicode_escapes": True}}
    assert not takes_text(schema | own, text)


def test_control_characters_have_escapes_where_keys_cannot_be_confused():
    assert takes_text({"enum": ["\x01", "\x7f"]}, '"\\u0001"') and takes_text({"type": "object"}, '{"\\u0001": 1}')
    assert not takes_text({"type": "string"}, '"\\u0041"') and not takes_text({"type": "object"}, '{"\\u0041": 1}')


A, B, C = properties(a=N), properties(b=N), properties(c=N)
CLOSED = {
    "an object": (A, ['{"a": 1}', "{}"], ['{"b": 1}', '{"a": 1, "b": 1}']),
    "an object without keys": (properties(), ["{}"], ['{"a": 1}']),
    "an open object": ({"type": "object"}, ['{"x": 1}'], []),
    "an object that says it is open": (A | {"additionalProperties": True}, ['{"a": 1, "b": 2}'], []),
    "an object with patterns": (A | {"patternProperties": {"^x": N}}, ['{"a": 1, "xy": 2}'], []),
    "an inner object": ({"items": A}, ['[{"a": 1}]'], ['[{"b": 1}]']),
    "a required key": (A | {"required": ["b"]}, ['{"b": true}', '{"a": 1, "b": 2}'], ['{"b": 1, "c": 1}']),
    "joined objects": ({"allOf": [A, B]}, ['{"a": 1, "b": 1}', "{}"], ['{"c": 1}', '{"a": 1, "b": 1, "c": 1}']),
    "joined with an open one": ({"allOf": [A, B | {"additionalProperties": True}]}, ['{"a": 1, "b": 1, "c": 1}'], []),
    "a union": (
        {"anyOf": [A, B, {"type": "null"}]},
        ['{"a": 1}', '{"b": 1}', "null"],
        ['{"a": 1, "b": 1}', '{"c": 1}'],
    ),
    "a union beside keys": (
        A | {"anyOf": [B, C | {"required": ["c"]}]},
        ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}'],
        ['{"a": 1, "b": 1, "c": 1}', '{"d": 1}'],
    ),
    "a union in a union beside keys": (
        A | {"anyOf": [B | {"anyOf": [C, properties(e=N)]}, {"type": "null"}]},
        ['{"a": 1, "b": 1, "c": 1}', '{"a": 1, "b": 1, "e": 1}', '{"a": 1}'],
        ['{"a": 1, "d": 1}', '{"a": 1, "c": 1, "e": 1}'],
    ),
    "a union with an open object": (
        A | {"anyOf": [B | {"additionalProperties": True}, C]},
        ['{"a": 1, "b": 1, "d": 1}', '{"a": 1, "c": 1}'],
        ['{"a": "x"}'],
    ),
    "a union of demands": (
        properties(a=N, b=N) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'],
        ["{}", '{"a": 1, "c": 1}'],
    ),
    "a reference": ({"$ref": "#/$defs/x", "$defs": {"x": A}}, ['{"a": 1}'], ['{"b": 1}']),
    "a definition that is joined and alone": (
        {"allOf": [{"$ref": "#/$defs/x"}, properties(b={"$ref": "#/$defs/x"})], "$defs": {"x": A}},
        ['{"a": 1, "b": {"a": 1}}'],
        ['{"a": 1, "b": {"c": 1}}', '{"c": 1}'],
    ),
    "an object of itself": (properties(next={"$ref": "#"}), ['{"next": {"next": {}}}'], ['{"next": {"a": 1}}']),
    "an anchor": (
        properties(a={"$ref": "#x"}) | {"$defs": {"d": B | {"$anchor": "x"}}},
        ['{"a": {"b": 1}}'],
        ['{"a": {"c": 1}}'],
    ),
    "an object with an id": (
        A
        | {
            "$id": "T0",
            "properties": {"a": {"items": {"$ref": "T0"}}, "b": {"$ref": "T0#/$defs/d"}},
            "$defs": {"d": C},
        },
        ['{"a": [{"a": []}], "b": {"c": 1}}'],
        ['{"a": [{"x": 1}]}', '{"b": {"a": 1}}'],
    ),
    "an older draft": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x", "definitions": {"x": A}},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "a definition of definitions": (
        {"$ref": "#/$defs/x", "$defs": {"x": properties(k={"$ref": "#/$defs/x/$defs/y"}) | {"$defs": {"y": A}}}},
        ['{"k": {"a": 1}}'],
        ['{"k": {"b": 1}}', '{"a": 1}'],
    ),
}


@looped("case", CLOSED)
def test_objects_are_closed_unless_the_schema_says_otherwise(case):
    schema, good, bad = CLOSED[case]
    for coverage in ("strict", "lenient"):
        fitted = fit_schema(schema, "x", coverage, closed=True)
        assert [takes_text(fitted, text) for text in good + bad] == [True] * len(good) + [False] * len(bad)
    assert all(takes_text(schema, text) for text in good)


def test_unevaluated_keys_and_conditions_are_closed_as_far_as_they_are_named():
    conditional = properties(k=N) | {"if": {"required": ["k"]}, "then": properties(c=N), "unevaluatedProperties": False}
    fitted = fit_schema(conditional, "x", "lenient", closed=True)
    assert takes_text(fitted, '{"k": 1, "c": 2}') and not takes_text(fitted, '{"k": 1, "d": 2}')
    assert takes_text(fit_schema(A | {"unevaluatedProperties": N}, "x", "lenient", closed=True), '{"a": 1, "d": 2}')
    for joined in (
        {"allOf": [A, B]},
        B | {"$ref": "#/$defs/a", "$defs": {"a": A}},
        {"$ref": "#/$defs/a", "$defs": {"a": A}},
    ):
        fitted = fit_schema(joined | {"unevaluatedProperties": False}, "x", "strict", closed=True)
        assert takes_text(fitted, '{"a": 1}') and not takes_text(fitted, '{"a": 1, "d": 2}')


def test_what_is_no_schema_closes_nothing_and_is_told_as_such():
    for broken in (
        {"allOf": [A], "properties": 5},
        {"properties": A, "required": 5, "$ref": []},
        {"anyOf": A, "allOf": 3},
    ):
        with pytest.raises(ValueError, match=r"^x: /.*: "):
            fit_schema(broken, "x", "strict", closed=True)
        assert fit_schema(broken, "x", "lenient", closed=True)


def test_a_schema_of_thousands_of_unsupported_joins_is_refused_quickly():
    part = {"allOf": [{"minProperties": 1}] * 20 + [A | {"type": "object"}]}
    began = time.process_time()
    assert fit_schema(properties(**{f"p{number}": part for number in range(20)}), "x", "lenient")
    with pytest.raises(ValueError, match=r"^x: too many of its keywords"):
        fit_schema(properties(**{f"p{number}": part for number in range(200)}), "x", "lenient")
    assert time.process_time() - began < 5


def test_joins_that_multiply_are_refused_quickly():
    big = properties(**{f"p{number}": N for number in range(2000)})
    schema = {"anyOf": [{"allOf": [{"$ref": "#/$defs/big"}]}] * 1000, "$defs": {"big": big}}
    began = time.process_time()
    with pytest.raises(ValueError, match=r"^x: .*too many"):
        fit_schema(schema, "x", "lenient", closed=True)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.full)])
def test_texts_of_random_schemas_fulfil_them_and_broken_ones_are_refused(count):
    fuzz, seed = SchemaFuzz(), random.randrange(10**6)
    for number in range(count):
        fuzz.try_schema(seed + number)
        fuzz.try_broken(seed + number)
    assert not fuzz.failures, fuzz.failures[:3]
    assert fuzz.counts["valid"] > count and fuzz.counts["taken"] > count and fuzz.counts["fitted"] > count / 10
