"""`specengine generate`: answers one question."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from specengine.cli import options
from specengine.cli.console import show_logprobs, show_trace, summarise, write
from specengine.utils.console import note
from specengine.utils.spec_string import parse_named_paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specengine.engine.engine import Engine
    from specengine.tensor_parallel.loading import LoadedModel
    from specengine.types import GenerationOutput, Prompt, SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from stdin and cuts one final newline.")],
    model: options.Model = "smollm2-135m",
    drafter: options.Drafter = "auto",
    rule: options.Rule = "match",
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text without the chat template.")] = False,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = 0,
    adapter: options.Adapter = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-text token.")] = False,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Token id that ends the answer; repeatable.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Tokens before one that ends the answer.")] = 0,
    skip_special_tokens: Annotated[
        bool, typer.Option("--skip-special-tokens/--show-special-tokens", help="Leave special tokens out of the text.")
    ] = True,
    logprobs: Annotated[int, typer.Option(help="Show this many most likely tokens per position.")] = 0,
    n: Annotated[int, typer.Option("--n", "-n", help="Number of samples; sample i uses seed + i.")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="Show every cycle's tree and its accepted nodes.")] = False,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.Grammar = None,
    choices: options.Choices = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer one question.

    The prompt becomes a chat turn in the model's chat template. With --raw, and for models without a template,
    the model continues the text. Models without a tokenizer (random:<preset>) read and write token ids: "5 17".
    """
    from specengine.engine.engine import Engine
    from specengine.types import SamplingParams

    adapters = parse_named_paths("adapter", [adapter])
    given = {
        **options.read_constraint(json_schema, regex, grammar, choices),
        "logit_bias": options.parse_logit_bias(logit_bias or []),
        "adapter": next(iter(adapters), None),
    }
    params = SamplingParams.among({**locals(), **given})
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    engine = Engine(model, drafter=drafter, rule=rule, device=device, dtype=dtype, adapters=adapters or None)
    request = _make_prompt(prompt, system, raw, engine.model)
    begin = time.perf_counter()
    if n == 1 and not as_json:
        outputs = [_stream(engine, request, params)]
    else:
        result = engine.generate(request, params)
        outputs = result if isinstance(result, list) else [result]
    seconds = time.perf_counter() - begin
    if as_json:
        found = [output.to_dict() for output in outputs]
        typer.echo(json.dumps(found[0] if n == 1 else {"outputs": found}))
        return
    _show_outputs(engine, outputs)
    note(summarise(outputs, seconds, engine.drafter.name))


def _make_prompt(text: str, system: str | None, raw: bool, model: LoadedModel) -> Prompt:
    """Makes chat messages if the model has a template, else text or token ids."""
    chat = model.tokenizer is not None and model.tokenizer.has_chat_template and not raw
    if system is not None and not chat:
        raise ValueError("system: needs a model with a chat template, and no --raw")
    if chat:
        messages = [{"role": "user", "content": text}]
        return messages if system is None else [{"role": "system", "content": system}, *messages]
    if model.tokenizer is not None:
        return text
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(
            f"prompt: {model.name} has no tokenizer; expected token ids such as '5 17', got {text[:80]!r}"
        ) from None


def _stream(engine: Engine, prompt: Prompt, params: SamplingParams) -> GenerationOutput:
    """Writes text, or token ids without a tokenizer, as cycles end; then ends the line."""
    for event in engine.stream(prompt, params):
        write(event.text if engine.tokenizer else f"{_format_ids(event.token_ids)} ")
    write("\n")
    assert event.output is not None  # the last event carries it
    return event.output


def _show_outputs(engine: Engine, outputs: Sequence[GenerationOutput]) -> None:
    """Shows traces and log-probabilities, and the texts if there are several."""
    token_text = engine.tokenizer.token_text if engine.tokenizer else str
    count = len(outputs)
    for number, output in enumerate(outputs, start=1):
        if count > 1:
            write(f"[{number}/{count}]\n{output.text if engine.tokenizer else _format_ids(output.token_ids)}\n")
        show_trace(output.trace or (), token_text)
        show_logprobs(output.logprobs or (), token_text)


def _format_ids(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))
