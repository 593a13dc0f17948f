"""A small tokenizer for the tiny random models, and constraints for their texts."""

from __future__ import annotations

import dataclasses

from specengine.constraints import Grammars
from specengine.tensor_parallel.loading import LoadedModel
from specengine.tokenizer import Tokenizer
from tests.engines import tiny_model
from tests.tokenizer.vocabularies import BYTES

MERGES = (
    '{ "',
    '" :',
    'Ġ "',
    '" ,',
    "n a",
    "m e",
    "na me",
    "t h",
    "th e",
    "y e",
    "ye s",
    "a g",
    "ag e",
    "t r",
    "a l",
    "' s",
)
SPECIAL = ("<s>", "<think>", "</think>", "<call>", "<end>", "<turn>")  # the last two end a text
FIRST = 256 + len(MERGES)  # of the special tokens
THINK_END, CALL, END, TURN = (FIRST + SPECIAL.index(text) for text in ("</think>", "<call>", "<end>", "<turn>"))
ENDS = frozenset((END, TURN))

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["the", "then", "age"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2,5} (is|was) [0-9]{1,3} years old\."
CHOICES = ("yes, of course", "yes, always", "never")
THINKING = """\
start: /[a-z ]{0,20}/ </think> %json {"enum": [{"name": "the", "age": 3}, {"name": "yes"}]}
%llguidance {"no_forcing": false}"""
CONSTRAINTS = ({"json_schema": SCHEMA}, {"regex": REGEX}, {"choices": CHOICES}, {"grammar": THINKING})


def tiny_tokenizer() -> Tokenizer:
    """Byte-level: the 256 bytes (id = byte), MERGES, SPECIAL."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*BYTES, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL],
            "tokenizer.ggml.token_type": [1] * FIRST + [3, 4, 4, 4, 3, 3],
            "tokenizer.ggml.merges": [*MERGES],
            "tokenizer.ggml.eos_token_id": END,
        }
    )


TOKENIZER = tiny_tokenizer()


def talking_model() -> LoadedModel:
    """The tiny random model with a tokenizer, which knows no id from there to the model's 320th."""
    return dataclasses.replace(tiny_model(), tokenizer=TOKENIZER, eos_token_ids=ENDS)


def grammars(**options) -> Grammars:
    return Grammars(TOKENIZER, ENDS, 320, **options)
