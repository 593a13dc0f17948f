"""`python -m specengine.bench.masks`: what a constraint costs a cycle of plain decoding, by the size of the vocabulary.

Each question of `--questions schemas` is answered with its schema, and then without for as long. A model of random
weights gets a vocabulary of its size: that of SmolLM2 and pairs of its tokens.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from specengine.bench.race.questions import SCHEMAS, Question, load_questions
from specengine.engine.engine import Engine
from specengine.tensor_parallel.loading import LoadedModel, load_model, load_tokenizer
from specengine.tokenizer import Tokenizer
from specengine.types import GenerationOutput, SamplingParams

MODELS = "smollm2-135m,random:qwen2.5-0.5b"
WORDS = "smollm2-135m"  # whose tokenizer the models of random weights get, with pairs of its tokens
TOKENS = 64  # of an answer, at most


def wide_tokenizer(base: Tokenizer, size: int) -> Tokenizer:
    """Returns a byte-level tokenizer of `size` entries: those of another one, and pairs of them that it lacks."""
    entries, draw = base.entries(), random.Random(0)
    tokens = [entries.get(token, f"<unused {token}>") for token in range(base.vocab_size)]
    known, special = set(tokens), base.added_tokens
    plain = [token for number, token in enumerate(tokens) if number not in special]
    while len(tokens) < size:
        if (pair := draw.choice(plain) + draw.choice(plain)) not in known:
            known.add(pair)
            tokens.append(pair)
    types = [3 if number in special else 1 for number in range(size)]
    columns = {"tokens": tokens, "token_type": types, "merges": [], "eos_token_id": base.eos_token_ids[0]}
    metadata = {"model": "gpt2", "pre": "gpt-2", **columns}
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


def model_with_words(name: str) -> LoadedModel:
    """Loads a model; gives one without a tokenizer a wide one."""
    model = load_model(name)
    if model.tokenizer is not None:
        return model
    base = load_tokenizer(WORDS)
    assert base is not None
    wide = wide_tokenizer(base, model.config.vocab_size - 256)  # models have more rows than their tokenizers entries
    return replace(model, tokenizer=wide, eos_token_ids=frozenset(wide.eos_token_ids))


def mask_cost(model: LoadedModel, questions: list[Question], temperature: float, repetitions: int) -> dict[str, Any]:
    """Returns the median seconds of a cycle with and without a schema, and the share that the schema adds."""
    engine, tokenizer = Engine(model, drafter="none", prefix_cache_mib=0), model.tokenizer
    assert tokenizer is not None
    seconds: dict[bool, list[float]] = {False: [], True: []}

    def answer(question: Question, params: SamplingParams) -> GenerationOutput:
        output = engine.generate(tokenizer.encode(question.turns[0]), params)
        seconds[params.constraint is not None].append(output.stats.decode_seconds / output.stats.cycles)
        return output

    for _ in range(repetitions):
        for question in questions:
            params = SamplingParams(max_new_tokens=TOKENS, temperature=temperature)
            count = len(answer(question, question.params(params)).token_ids)
            answer(question, replace(params, max_new_tokens=count, ignore_eos=True))
    plain, masked = median(seconds[False]), median(seconds[True])
    ratios = [one / other for one, other in zip(seconds[True], seconds[False], strict=True)]
    names = {"model": model.name, "vocabulary": model.config.vocab_size, "temperature": temperature}
    return {**names, "plain_seconds": plain, "masked_seconds": masked, "cost": median(ratios) - 1}


def main(
    models: Annotated[str, typer.Option(help="Separated by commas.")] = MODELS,
    limit: Annotated[int, typer.Option(help="At most this many questions.")] = 30,
    repetitions: int = 3,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the results here.")] = None,
) -> None:
    """Measure what a constraint costs a cycle of plain decoding."""
    questions = load_questions(SCHEMAS, limit)
    loaded = [model_with_words(name) for name in models.split(",")]
    rows = [mask_cost(model, questions, each, repetitions) for model in loaded for each in (0.0, 0.8)]
    for row in rows:
        typer.echo(
            f"{row['model']}, {row['vocabulary']} tokens, temperature {row['temperature']:g}: {row['cost']:.1%} of a "
            f"cycle, {1e3 * row['plain_seconds']:.2f} ms without, {1e3 * row['masked_seconds']:.2f} ms with a schema"
        )
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
