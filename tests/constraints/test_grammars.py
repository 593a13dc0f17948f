"""What a constraint may be; how it is compiled and kept."""

import gc
import json
import subprocess
import sys
import threading
import time
from typing import ClassVar
from weakref import ref

import pytest
from llguidance import LLMatcher

from specengine import SamplingParams
from specengine.constraints import Grammars
from specengine.constraints.text_size import text_size
from tests.constraints.masks import allowed_tokens
from tests.constraints.vocabulary import CALL, CHOICES, END, ENDS, FIRST, REGEX, SCHEMA, TOKENIZER, TURN, grammars
from tests.selection import looped

MALFORMED = {
    "a schema that no value fulfils": ({"json_schema": {"type": "string", "enum": []}}, "json_schema: Unsat"),
    "bounds that cross": ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "json_schema: .*minLen"),
    "a required key without a value": (
        {"json_schema": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}},
        "json_schema: .*'a'",
    ),
    "a keyword that is not supported": ({"json_schema": {"not": {"type": "string"}}}, 'json_schema: .*"not"'),
    "an unknown type": ({"json_schema": {"type": "strin"}}, "json_schema: .*strin"),
    "a reference to nothing": ({"json_schema": {"$ref": "#/$defs/x"}}, "json_schema: .*/x"),
    "a multiple of many states": (
        {"json_schema": {"properties": {"n": {"type": "integer", "multipleOf": 999983}}}},
        "json_schema: /properties/n/multipleOf: .*10000",
    ),
    "joined multiples": (
        {"json_schema": {"type": "integer", "allOf": [{"multipleOf": n} for n in (97, 89, 83)]}},
        "json_schema: /allOf/2/multipleOf: joined",
    ),
    "a multiple inside of a grammar": (
        {"grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'},
        "grammar: /multipleOf: ",
    ),
    "an open group": ({"regex": "a(b"}, "regex: .*unclosed group"),
    "a look-ahead": ({"regex": "a(?=b)"}, "regex: .*look"),
    "a regex without a text": ({"regex": r"[^\s\S]"}, "regex: no text"),
    "a rule that is missing": ({"grammar": "start: other"}, "grammar: .*other"),
    "a token that is missing": ({"grammar": "start: <nothing>"}, "grammar: .*<nothing>"),
    "a required reference to itself": (
        {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        "json_schema: .*no finite text",
    ),
    "an end of the text": ({"grammar": 'start: "a" <end> "b"'}, "grammar: <end>: <end> ends"),
    "another end": ({"grammar": 'start: "a" /<x>/ <turn> "b"'}, "grammar: <turn>: "),
    "an end by its number": ({"grammar": f'start: "a" <[{END}]> "b"'}, r"grammar: <\[\d+\]>: <end> ends"),
    "an end in a range": ({"grammar": f'start: "a" <[1,{END - 1}-{END + 2}]> "b"'}, "grammar: .*<end> ends"),
    "any token": ({"grammar": 'start: "a" <[*]> "b"'}, r"grammar: <\[\*\]>: <end> ends"),
    "any token but one": ({"grammar": f'start: "a" <[^{END}]> "b"'}, "grammar: .*<turn> ends"),
    "a temperature": ({"grammar": 'start: g\ng[temperature=0.0]: "ab"'}, "grammar: temperature: "),
    "a limit of tokens": ({"grammar": "start: g\ng[capture, max_tokens=3]: /[a-z]+/"}, "grammar: max_tokens: "),
    "a deep schema in a grammar": (
        {"grammar": "start: %json " + '{"a":' * 99999 + "1" + "}" * 99999},
        "grammar: .*deep",
    ),
    "an empty intersection": ({"grammar": "start: X\nX: /a/ & /b/"}, "grammar: no text"),
}


@pytest.mark.parametrize("given, message", MALFORMED.values(), ids=MALFORMED)
def test_a_constraint_that_cannot_be_kept_is_refused_with_its_name_and_place(given, message):
    with pytest.raises(ValueError, match=f"(?s)^{message}"):
        grammars().constraint(SamplingParams(**given))


def test_a_model_without_tokenizer_or_end_of_text_refuses_every_constraint():
    with pytest.raises(ValueError, match=r"^choices: this model has no tokenizer"):
        Grammars(None, ENDS, 320).constraint(SamplingParams(choices=["a"]))
    with pytest.raises(ValueError, match=r"^regex: this model has no end-of-text token"):
        Grammars(TOKENIZER, (), 320).constraint(SamplingParams(regex="a"))
    assert Grammars(None, (), 320).constraint(SamplingParams()) is None


def test_multiples_of_few_states_are_kept():
    for schema in (
        {"multipleOf": 0.01, "type": "number"},
        {"multipleOf": 5000, "type": "integer"},
        {"const": {"multipleOf": 1e9}},
    ):
        assert grammars().constraint(SamplingParams(json_schema=schema))


def test_a_grammar_that_compiles_slowly_delays_no_other(monkeypatch):
    kept, begun, go_on = grammars(), threading.Event(), threading.Event()
    compile_one, count = kept._compile, []

    def slowly(name, grammar):
        count.append(grammar)
        if len(count) == 1:
            begun.set()
            assert go_on.wait(20)
        return compile_one(name, grammar)

    monkeypatch.setattr(kept, "_compile", slowly)
    threads = [
        threading.Thread(target=kept.constraint, args=[SamplingParams(regex="a")], daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        assert begun.wait(20)
    quick = threading.Thread(target=kept.constraint, args=[SamplingParams(regex="b")], daemon=True)
    quick.start()
    quick.join(10)
    assert not quick.is_alive() and threads[0].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(count) == 2  # the same grammar is compiled once


def texts_of(**given) -> set[str]:
    """The language of a small constraint, by walking every mask."""
    found, open_texts, params, kept = set(), [()], SamplingParams(**given), grammars()
    while open_texts:
        text = open_texts.pop()
        constraint = kept.constraint(params)
        constraint.advance(text)
        for token in allowed_tokens(constraint):
            if token in ENDS:
                found.add(TOKENIZER.decode(text))
            else:
                open_texts.append((*text, token))
        assert len(found) + len(open_texts) < 500
    return found


def test_choices_are_their_texts_whatever_characters_they_have():
    texts = ("yes", 'a "quote" \\ and\nlines', "é🦙", "ye")
    assert texts_of(choices=texts[1:3]) == set(texts[1:3])
    assert texts_of(choices=("yes", "ye")) == {"yes", "ye"}


def test_choices_with_characters_of_expressions_are_themselves():
    texts = (*r".^$*+?()[]{}|\/-&~#", "a.b", "1+1", "[a-c]", r"\d", "\t\n", "漢 字")
    assert all(texts_of(choices=[text]) == {text} for text in texts)
    assert texts_of(choices=texts) == set(texts)


@pytest.mark.full
def test_an_object_of_many_optional_keys_is_followed_or_refused_at_once():
    schema = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(1000)}}
    grammars().constraint(SamplingParams(json_schema=schema)).advance(TOKENIZER.encode('{"p999": null'))
    schema["properties"] |= {f"q{number}": {"type": "null"} for number in range(5000)}
    with pytest.raises(ValueError, match=r"(?s)^json_schema: .*max is 20000"):
        grammars().constraint(SamplingParams(json_schema=schema))


def test_a_description_may_speak_of_grammars():
    schema = '{"type": "object", "description": "write %json {} here", "properties": {"a": {"enum": [{"b": 1}]}}, '
    schema += '"required": ["a"], "additionalProperties": false}'
    assert texts_of(grammar=f"start: %json {schema}") == {'{"a": {"b": 1}}'}
    with pytest.raises(ValueError, match=r"^grammar: /x-guidance: expected"):
        grammars().constraint(SamplingParams(grammar='start: %json {"x-guidance": 5}'))


def test_thousands_of_choices_are_followed():
    constraint = grammars().constraint(SamplingParams(choices=[f"no {number}" for number in range(6000)]))
    constraint.advance(TOKENIZER.encode("no 5999"))
    assert {*allowed_tokens(constraint)} == ENDS


def test_json_has_one_form_alone_and_inside_of_a_grammar():
    schema = {"enum": [{"a": 1, "b": [2]}]}
    assert texts_of(json_schema=schema) == {'{"a": 1, "b": [2]}'}
    assert texts_of(grammar=f"start: %json {json.dumps(schema)}") == {'{"a": 1, "b": [2]}'}
    own = schema | {"x-guidance": {"item_separator": ",", "key_separator": ":"}}
    assert texts_of(json_schema=own) == {'{"a":1,"b":[2]}'} == texts_of(grammar=f"start: %json {json.dumps(own)}")


def test_the_empty_schema_is_any_object():
    constraint = grammars().constraint(SamplingParams(json_schema={}))
    first = {TOKENIZER.token_text(token) for token in allowed_tokens(constraint)}
    assert first == {"{", '{"'}  # no number, no list


def test_the_last_grammars_are_kept_and_no_more():
    kept = grammars(kept=2)
    for params in (SamplingParams(regex=text) for text in ("a", "b", "a", "c", "a")):
        kept.constraint(params)
    assert len(kept) == 2
    made = []
    kept._compile = lambda name, grammar: made.append(grammar)  # type: ignore[method-assign]
    with pytest.raises(AttributeError):  # b is not there any more
        kept.constraint(SamplingParams(regex="b"))
    assert len(made) == 1
    kept.constraint(SamplingParams(regex="a"))
    assert len(made) == 1


def test_the_kept_grammars_are_bounded_by_their_text_too_and_the_last_one_stays():
    kept = grammars(kept_text=1000)
    sizes = []
    for text in ("a" * 400, "b" * 400, "c" * 300, "(d{100}){50}", "e"):
        kept.constraint(SamplingParams(regex=text))
        sizes.append(len(kept))
    assert sizes == [1, 2, 2, 1, 1]


@pytest.mark.parametrize(
    "text, size",
    [("ab{10}", 11), ("(ab){1000}", 2000), ("((ab){10}c){2,20}", 420), ('{"a": "(b"}', 11), ("))", 2), ("a{}", 3)],
)
def test_a_text_counts_what_it_repeats(text, size):
    assert text_size(text) == size


class Watched:
    """A matcher of which can be seen whether it is still there."""

    grammar_from_regex = LLMatcher.grammar_from_regex
    grammar_from_lark = LLMatcher.grammar_from_lark
    made: ClassVar[list[ref]] = []

    def __init__(self, *given, **more):
        self._matcher = LLMatcher(*given, **more)
        self.made.append(ref(self))

    def __getattr__(self, name):
        return getattr(self._matcher, name)


def test_nothing_of_a_refused_constraint_stays(monkeypatch):
    monkeypatch.setattr("llguidance.LLMatcher", Watched)
    gc.disable()
    try:
        for given in ({"regex": r"[^\s\S]"}, {"grammar": "start: X\nX: /a/ & /b/"}):
            with pytest.raises(ValueError) as refused:
                grammars().constraint(SamplingParams(**given))
            assert not Watched.made.pop()() and refused.value  # not even while its error is there
        constraint = grammars().constraint(SamplingParams(regex="a"))
        assert Watched.made.pop()() and constraint
    finally:
        gc.enable()


def test_threads_may_ask_at_once():
    shared, masks = grammars(), []

    def ask(given) -> None:
        for _ in range(5):
            masks.append((str(given), tuple(allowed_tokens(shared.constraint(SamplingParams(**given))))))

    given = ({"json_schema": SCHEMA}, {"regex": REGEX}, {"choices": CHOICES})
    threads = [threading.Thread(target=ask, args=(each,)) for each in given * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(masks) == 30 and len(set(masks)) == 3 == len(shared)


def test_ids_past_the_tokenizer_are_never_allowed():
    constraint = grammars().constraint(SamplingParams(grammar="start: /(.|\\n)*/"))
    assert max(allowed_tokens(constraint)) == max(ENDS) < 319


NAMES = {
    "strings": (r'start: "<end> [max_tokens=3] %json {} \" <turn>"', '<end> [max_tokens=3] %json {} " <turn>'),
    "regexes": (r"start: /<end>\/%json \{\}/", "<end>/%json {}"),
    "comments": ('start: "a" // <end> %json {"multipleOf": 999983}\n# g[temperature=0]: <turn>', "a"),
}


@pytest.mark.parametrize("grammar, text", NAMES.values(), ids=NAMES)
def test_literals_of_a_grammar_name_nothing(grammar, text):
    constraint = grammars().constraint(SamplingParams(grammar=grammar))
    constraint.advance([*text.encode()])
    assert set(allowed_tokens(constraint)) == ENDS


def test_tokens_that_end_nothing_may_be_named():
    for named in ("<call>", f"<[{CALL}]>", f"<[{FIRST}-{CALL}]>", f"<[^{END},{TURN}]>"):
        constraint = grammars().constraint(SamplingParams(grammar=f'start: {named} "b"'))
        constraint.advance([CALL, ord("b")])
        assert set(allowed_tokens(constraint)) == ENDS


ENDLESS = """
from specengine.types import SamplingParams
from tests.constraints.masks import allowed_tokens
from tests.constraints.vocabulary import grammars
for start, text in ("A B", b"aa"), ('"!" | "x" A B', b"xaa"), ('%lark {\\nstart: A B\\nA: /a+/\\nB: /ab/\\n}', b"aa"):
    grammar = f"start: {start}\\nA: /a+/\\nB: /ab/"
    constraint = grammars().constraint(SamplingParams(grammar=grammar))
    constraint.advance([*text])
    print(allowed_tokens(constraint))
"""


N = 20_000
LONG = {
    "open attributes": 'start: "x"\nb: ' + "a[" * N,
    "escaped quotes": 'start: "' + r"\"" * N,
    "escaped slashes": "start: /" + r"\/" * N,
    "open ids": "start: " + "<[" * N,
    "open tokens": "start: " + "<a" * N,
    "spaces": "start: a" + " " * N + "[",
    "a name": "a" * N,
    "params": "a::" * N,
    "attributes": "a[b]" + "[b]" * N,
    "broken JSON": 'start: "a" ' + "%json {" * N,
    "open classes of GBNF": "root ::= " + "a[" * N,
    "open quotes of GBNF": "root ::= " + r"\"" * N,
    "open repetitions of GBNF": "root ::= " + "a{" * N,
    "spaces before GBNF": " " * N + "root",
}


@looped("case", LONG)
def test_a_long_grammar_is_read_in_time_in_proportion_to_its_length(case):
    began = time.process_time()
    with pytest.raises(ValueError, match=r"^grammar: "):
        grammars().constraint(SamplingParams(grammar=LONG[case]))
    assert time.process_time() - began < 1  # reading in quadratic time takes four seconds and more


@looped("name", ["r", "R"])
def test_a_long_chain_of_rules_is_refused_before_it_overflows_the_engine_s_stack(name):
    def chain(length: int) -> str:
        rules = (f'{name}{number}: "x"? {name}{number + 1}\n' for number in range(length))
        return f'start: {name}0\n{"".join(rules)}{name}{length}: "a"'

    with pytest.raises(ValueError, match=r"^grammar: its rules .* 400 levels"):
        grammars().constraint(SamplingParams(grammar=chain(3_000)))
    assert grammars().constraint(SamplingParams(grammar=chain(300)))
    many = " | ".join(f"{name.lower()}{number}" for number in range(900))
    flat = "\n".join(f'{name.lower()}{number}: "{number}"' for number in range(900))
    assert grammars().constraint(SamplingParams(grammar=f"start: {many}\n{flat}"))


@pytest.mark.full
def test_a_grammar_that_forces_an_endless_text_holds_nothing_up():
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[97]\n" * 3
