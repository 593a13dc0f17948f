"""Grammars of llama.cpp accept the texts that they accept there."""

import contextlib
import time

import pytest

from specengine import SamplingParams
from specengine.constraints.gbnf import as_lark
from tests.constraints.vocabulary import TOKENIZER, grammars
from tests.selection import looped

CHESS = """\
# Specifies chess moves as a list in algebraic notation
root     ::= "1. " move " " move "\\n" ([1-9] [0-9]? ". " move " " move "\\n")+
move     ::= (pawn | nonpawn | castle) [+#]?
nonpawn  ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn     ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle   ::= "O-O" "-O"?
"""
ARITHMETIC = """\
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
NESTED = r"""
root ::=
  a-b
  | "(" (
    root | "c"
  ) ")"
a-b ::= "12"{2} "3"{ 1 , 2 }
"""
NAMES = """
root ::= start | a-b a_b aB ()
start ::= "s" | ( | "t")
a-b ::= "1"
a_b ::= "2"
aB ::= "3"
"""
CASES = [
    (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 O-O\n10. exd5 a8=Q+\n"], ["1. e4 e5\n", "2. e4 e5\n1. e4 e5\n"]),
    (ARITHMETIC, ["a*(3 -b)/2=x\n", "1+1=2\n3=3\n"], ["1+=2\n", "1+1=2", "1^1=2\n"]),
    (JSON, ['{"a": [1.5e3, "\\u00e9é\\n"], "b": {}}', "{}"], ["[]", '{"a"}', '{"a": "\\x"}']),
    ('root ::= "a"+ "ab"', ["aab", "aaaab"], ["ab", "aaa"]),  # a lexeme for each part would take every "a"
    (r'root ::= "\u00e9" [\u00e8-\U000000eb]+ "\x41\t"', ["ééëA\t"], ["éeA\t", "éìA\t"]),
    ('root ::= "a" . "b"', ["a\nb", "aéb", 'a"b'], ["ab", "axxb"]),
    (r"root ::= [a^]+", ["a^", "^"], ["b", "a-"]),
    (r"root ::= [a\-c]+ [*--]+ [a-c-e-] [^^] [\]\[]", ["a-c*+,-b-]", "a+-x["], ["b*ax]", "a*ax-", "a*a^]"]),
    ('root ::= "/" [/"] "//" [#] # not this\n', ['/"//#', "////#"], ["/"]),
    (NESTED, ["12123", "(121233)", "(((c)))"], ["123", "12"]),
    (NAMES, ["s", "", "123"], ["12"]),
    ('root ::= "x" word* | "y" root\nword ::= [a-z]+ | "true" | "-" |', ["xtr", "yx-true-tru"], ["xT", "y"]),
    ("# c ::= d\nroot::=[&&a~~]\r\n", ["&", "~", "a"], ["b"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["a"]),
]


def accepts(grammar: str, text: str) -> bool:
    constraint = grammars().constraint(SamplingParams(grammar=grammar))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return constraint._matcher.try_consume_tokens(ids) == len(ids) and constraint._matcher.is_accepting()


@looped("grammar, good, bad", CASES)
def test_a_grammar_of_llama_cpp_accepts_its_texts_alone(grammar, good, bad):
    assert {text: accepts(grammar, text) for text in (*good, *bad)} == {text: text in good for text in (*good, *bad)}


@looped(
    "grammar, said",
    [
        ('start ::= "a"', "no rule 'root'"),
        ("root ::= other-rule", "no rule 'other-rule'"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        (r'root ::= "\d"', r"'\\\\d' is no escape"),
        (r'root ::= "\ud800"', "U\\+d800 is no character"),
        ("root ::= [a", r"cannot have '\['"),
        ('root ::= "a', "cannot have '\"'"),
        ("root ::= <think>", "cannot have '<'"),
        ('root ::= "a" ::= "b"', "no name of a rule"),
    ],
)
def test_what_is_no_grammar_of_llama_cpp_is_refused_by_name(grammar, said):
    with pytest.raises(ValueError, match=f"^grammar: .*{said}"):
        accepts(grammar, "")


@looped("text", ["[", '"', "{", '"\\\\', "[a", "(", "a ", "a ::= ", "#", "\n", "-"])
def test_a_long_grammar_is_read_in_time_in_proportion_to_its_length(text):
    for begin in ("root ::= ", ""):
        began = time.process_time()
        with contextlib.suppress(ValueError):
            as_lark(begin + text * (400_000 // len(text)))
        assert time.process_time() - began < 3


def test_a_lark_grammar_stays_as_it_is():
    for grammar in (
        "",
        '# root ::= x\nstart: "a"',
        'start: "::=" A',
        '// root ::= x\nstart: "a"',
        "%llguidance {}\nstart: /root ::= /",
        "x",
    ):
        assert as_lark(grammar) == grammar
