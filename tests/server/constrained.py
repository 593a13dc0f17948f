"""Answers and constraints of chats, and which texts a constraint accepts."""

import functools
import json

import llguidance

from tests.server.tools import model_of

ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "now"}}
OBJECT = '{"city": "x"}'
FREE = "Just text."
ANY_OBJECT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


def accepts(name: str, params, text: str) -> bool:
    """Whether a text is of the language of a request's constraint, as the grammar engine reads the vocabulary."""
    schema = params.json_schema if isinstance(params.json_schema, str) else json.dumps(params.json_schema)
    from_lark, from_schema = llguidance.LLMatcher.grammar_from_lark, llguidance.LLMatcher.grammar_from_json_schema
    grammar = from_lark(params.grammar) if params.grammar else from_schema(schema)
    matcher = llguidance.LLMatcher(vocabulary_of(name), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = model_of(name).tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@functools.cache
def vocabulary_of(name: str) -> llguidance.LLTokenizer:
    class Vocabulary:
        def __init__(self, tokenizer) -> None:
            self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
            self.special_token_ids = [*tokenizer.added_tokens]
            self.eos_token_id, self.bos_token_id = tokenizer.eos_token_ids[0], None

        def __call__(self, text: str) -> list[int]:
            return []

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary(model_of(name).tokenizer)))
