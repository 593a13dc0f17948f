"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="Embedded name, checkpoint folder, GGUF file, hub name, or random:<preset>.")]
Drafter = Annotated[str, typer.Option(help="NAME[:PATH][,option=value...]: auto, none, prompt_lookup, ...")]
Rule = Annotated[str, typer.Option(help="Verification rule, NAME[:option=value,...]; lossless by default.")]
Device = Annotated[str, typer.Option(help="auto (CUDA if there is a GPU), cpu or cuda.")]
DType = Annotated[str, typer.Option(help="auto (as stored), auto-float32, float32, float16, bfloat16, int8 or int4.")]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]
MaxNewTokens = Annotated[int, typer.Option(help="Maximum number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Keep only the k most likely tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Keep only the most likely tokens of this total probability; 1 is off.")]
MinP = Annotated[float, typer.Option(help="Keep only tokens of this probability relative to the best; 0 is off.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Penalty of tokens in prompt and output; 1 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="Penalty of tokens in the output, applied once.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Penalty of tokens in the output, applied per occurrence.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=VALUE", help="Added to the score of a token id; repeatable.")
]
Adapter = Annotated[
    str | None, typer.Option(metavar="NAME=PATH", help="PEFT LoRA folder, with which the model answers.")
]
Seed = Annotated[int, typer.Option(help="Fixes the text at temperature > 0.")]
JsonSchema = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The answer is JSON of the schema in this file; {} is any object.")
]
Regex = Annotated[str | None, typer.Option(help="The whole answer matches this regular expression.")]
Grammar = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The answer follows the Lark or GBNF grammar in this file.")
]
Choices = Annotated[list[str] | None, typer.Option("--choice", help="The answer is one of these texts; repeatable.")]


def read_constraint(
    json_schema: Path | None, regex: str | None, grammar: Path | None, choices: list[str] | None
) -> dict:
    """Returns the constraint as arguments of SamplingParams.

    Raises FileNotFoundError, or ValueError naming the file.
    """
    schema, lark = _read("json_schema", json_schema), _read("grammar", grammar)
    return {"json_schema": schema, "regex": regex, "grammar": lark, "choices": choices or None}


def _read(name: str, path: Path | None) -> str | None:
    if path is None:
        return None
    if not path.is_file():
        raise FileNotFoundError(f"{name}: no such file {str(path)!r}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected UTF-8 text in {str(path)!r}, byte {error.start} is not") from None


def parse_logit_bias(pairs: list[str]) -> dict[int, float] | None:
    """Parses `ID=VALUE` pairs. Raises ValueError for any other form and for a repeated id."""
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            token_id, number = int(token), float(value)
        except ValueError:
            raise ValueError(f"logit_bias: expected ID=VALUE, a token id and a number, got {pair!r}") from None
        if token_id in bias:
            raise ValueError(f"logit_bias: token id {token_id} is given twice")
        bias[token_id] = number
    return bias or None
