"""Harnesses: tokenizers, chat templates, questions, recorded results and sampling parameters."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from specengine.bench.race.questions import load_questions
from specengine.bench.report import html_report
from specengine.bench.report.reading import read_results
from specengine.tokenizer import ChatTemplate, Tokenizer, template_child
from specengine.tokenizer.chat_template import CHAT_FORMATS
from specengine.types import SamplingParams
from tests.bench.results import result
from tests.fuzz.contract import Harness
from tests.fuzz.mutations import damaged_bytes, damaged_json, damaged_lines
from tests.models.files import CHAT_TEMPLATE
from tests.tokenizer.vocabularies import gguf_metadata, json_backend

TEXT = "the  the\n<s> 12 \u4f60 \U0001f999</s>"
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
JSON = 64  # bytes of Python's objects per byte of text


def _used(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids == tokenizer.encode(TEXT)
    tokenizer.decode(ids)
    tokenizer.decode(range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // 50)), skip_special_tokens=False)
    if tokenizer.has_chat_template:
        tokenizer.encode_chat(MESSAGES)


def _folder(path: Path) -> None:
    """Of a damaged file and intact ones beside it."""
    if path.name != "tokenizer.json" and not path.name.endswith(".model"):
        kind = "tokenizer.model" if path.parent.name.endswith("-model") else "tokenizer.json"
        (path.parent / kind).write_bytes((_models() if kind == "tokenizer.model" else _backends())[0])
    _used(Tokenizer.from_folder(path.parent))


@lru_cache(maxsize=1)
def _backends() -> list[bytes]:
    plain, metaspace = json.loads(json_backend().to_str()), json.loads(json_backend(False).to_str())
    small = {byte: index for index, byte in enumerate(["t", "h", "e", "\u2581", "<s>", "th", "<unk>"])}
    metaspace["model"] |= {"vocab": small, "merges": [["t", "h"]], "byte_fallback": True, "unk_token": "<unk>"}
    metaspace |= {"added_tokens": [], "pre_tokenizer": None}
    metaspace["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    metaspace["decoder"] = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    unigram = {**metaspace, "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["t", -1.0]]}}
    return [json.dumps(each).encode() for each in (plain, metaspace, unigram)]


@lru_cache(maxsize=1)
def _models() -> list[bytes]:
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "a lazy dog sleeps"] * 9),
        model_writer=made,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        minloglevel=2,
        remove_extra_whitespaces=False,
    )
    return [made.getvalue()]


def _tokenizer_configs() -> list[bytes]:
    token = {"content": "<s>", "special": True, "lstrip": False, "rstrip": False, "single_word": False}
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "legacy": False}
    decoder = {"added_tokens_decoder": {"1": token, "2": {**token, "content": "</s>"}}}
    named = {"chat_template": [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tools", "template": "x"}]}
    return [json.dumps({**names, **each}).encode() for each in ({}, decoder, named, {"chat_template": CHAT_TEMPLATE})]


def _vocabularies() -> list[bytes]:
    pieces = ["<unk>", "<s>", "</s>", "<0x41>", "t", "h", "e", "\u2581", "th", "the"]
    llama = {"model": "llama", "tokens": pieces, "scores": [-float(i) for i in range(10)], "merges": None, "pre": None}
    llama |= {"token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 4], "bos_token_id": 1, "eos_token_id": 2}
    every = [gguf_metadata(), gguf_metadata(**llama), gguf_metadata(pre="qwen2", add_bos_token=True)]
    return [json.dumps({**each, "tokenizer.chat_template": CHAT_TEMPLATE}).encode() for each in every]


def _vocabulary(path: Path) -> None:
    metadata = _json(path)
    if isinstance(metadata, dict):  # what a GGUF file's header gives
        _used(Tokenizer.from_gguf(metadata))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


_PIECES = (  # of templates, to be put together at random
    *(
        "{{ messages }}",
        "{{ x ~ x }}",
        "{% set x = [x, x] %}",
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ 'a' * 9**9 }}",
    ),
    *(
        "{% for i in range(99999) %}",
        "{% if m.role == 'user' %}",
        "{% endif %}",
        "{{ m.content | trim }}",
        "{{ ''.__class__ }}",
    ),
    *(
        "{% macro f(n) %}",
        "{{ f(n) }}",
        "{{ f(1) }}",
        "{% endmacro %}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ cycler.__init__.__globals__ }}",
    ),
    *(
        "{{ lipsum(99999) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ raise_exception('no') }}",
        "{% set x = 'abc' %}",
        "{{ x }}",
    ),
    *(
        "{% set x = x ~ x %}",
        "{{ '%09999999d' % 1 }}",
        "{{ (x | list) * 99999 }}",
        "{{ messages | tojson }}",
        "{# #}",
        "{{",
    ),
    *(
        "}}",
        "{%",
        "%}",
        "{{ x.format(x) }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ x | map(attribute='__class__') | list }}",
    ),
)


def _template_of_pieces(seeds: Sequence[bytes], draw: Random) -> bytes:
    if draw.random() < 0.5:
        return damaged_bytes(seeds, draw)
    return "".join(draw.choice(_PIECES) for _ in range(draw.randrange(1, 12))).encode()


def _template(path: Path) -> None:
    text = path.read_bytes().decode("utf-8", "replace")
    ChatTemplate(text, path.name, {"bos_token": "<s>"}).render(MESSAGES)


def _questions() -> list[bytes]:
    lines = [{"question_id": 81, "category": "writing", "turns": ["one", "two"]}, {"turns": ["x"], "other": [1]}]
    return ["\n".join(map(json.dumps, lines)).encode(), b'\xef\xbb\xbf{"turns": ["a"]}\n\n']


def _report(path: Path) -> None:
    found = read_results(path)
    page = "".join([*html_report._comparison(["a"], [found]), html_report._section("a", found, {})])
    assert "<script" not in page


def _results() -> list[bytes]:
    preset = {
        "name": "p",
        "about": "a",
        "rows": [{"method": "m", "published": {"speedup": [1, 2]}, "measured": {"tau": 2}}],
    }
    return [json.dumps(each).encode() for each in (result(), result(preset=preset))]


def _parameters(path: Path) -> None:
    arguments = _json(path)
    if isinstance(arguments, dict) and arguments.keys() <= set(SamplingParams.__dataclass_fields__):
        params = SamplingParams(**arguments)
        assert SamplingParams(**asdict(params)) == params


def _parameter_seeds() -> list[bytes]:
    full = {
        "temperature": 0.7,
        "top_p": 0.9,
        "logit_bias": None,
        "stop": ["a", "b"],
        "n": 3,
        "logprobs": 2,
        "trace": True,
    }
    return [json.dumps(asdict(SamplingParams())).encode(), json.dumps(full).encode()]


_FIELDS = tuple(SamplingParams.__dataclass_fields__)
HARNESSES = (
    Harness("tokenizer.json", _backends, _folder, ("tokenizer.json",), "backend/tokenizer.json", damaged_json, JSON),
    Harness("tokenizer.model", _models, _folder, ("tokenizer.model",), "pieces/tokenizer.model", growth=JSON),
    Harness(
        "tokenizer_config.json",
        _tokenizer_configs,
        _folder,
        ("words",),
        "words/tokenizer_config.json",
        damaged_json,
        JSON,
    ),
    Harness(
        "tokenizer_config.json beside tokenizer.model",
        _tokenizer_configs,
        _folder,
        ("words-model",),
        "words-model/tokenizer_config.json",
        damaged_json,
        JSON,
    ),
    Harness(
        "GGUF vocabulary", _vocabularies, _vocabulary, ("tokenizer.", "GGUF metadata"), "vocabulary", damaged_json, JSON
    ),
    Harness(
        "chat template",
        lambda: [text.encode() for text in (*CHAT_FORMATS.values(), CHAT_TEMPLATE)],
        _template,
        ("template.jinja",),
        "template.jinja",
        _template_of_pieces,
        base=8 * template_child.LONGEST,
    ),
    Harness("questions", _questions, load_questions, ("questions.jsonl",), "questions.jsonl", damaged_lines, JSON),
    Harness("results", _results, _report, ("results.json",), "results.json", damaged_json, JSON),
    Harness("SamplingParams", _parameter_seeds, _parameters, _FIELDS, "parameters", damaged_json, JSON),
)
