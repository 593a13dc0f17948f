"""The console script `specengine`: generate, chat, serve, models, train, corpus, report."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from specengine.cli.console import show_logprobs, show_trace, summary, write
from specengine.utils.console import note, one_line_errors

if TYPE_CHECKING:
    from specengine.engine.engine import Engine
    from specengine.tensor_parallel.loading import LoadedModel
    from specengine.types import GenerationOutput, Prompt, SamplingParams


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    help="Lossless speculative decoding for LLaMA, Vicuna and Qwen models.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from specengine.utils.build_info import build_info

    info = build_info()
    typer.echo(f"specengine {info['version']}")
    typer.echo(f"compiler: {info['compiler']}")
    typer.echo(f"instruction sets: {', '.join(info['instruction_sets'])} (in use: {info['instruction_set']})")
    typer.echo(f"CUDA architectures: {', '.join(info['cuda_architectures']) or 'no CUDA'}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Version and build; then exit."),
    ] = False,
) -> None:
    pass


Model = Annotated[str, typer.Option(help="Embedded name, checkpoint folder, GGUF file, hub name, or random:<preset>.")]
Drafter = Annotated[str, typer.Option(help="NAME[:PATH][,option=value...]: auto, none, prompt_lookup, ...")]
Rule = Annotated[str, typer.Option(help="Verification rule, NAME[:option=value,...]; lossless by default.")]
Device = Annotated[str, typer.Option(help="auto (CUDA where there is a GPU), cpu or cuda.")]
DType = Annotated[str, typer.Option(help="auto (as stored), float32, float16, bfloat16, int8 or int4.")]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]
MaxNewTokens = Annotated[int, typer.Option(help="At most this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Only the k most likely tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Only the most likely tokens of this total probability; 1 is off.")]
MinP = Annotated[float, typer.Option(help="Only tokens of this probability relative to the best; 0 is off.")]
RepetitionPenalty = Annotated[float, typer.Option(help="For tokens in prompt and output; 1 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="For tokens in the output, once.")]
FrequencyPenalty = Annotated[float, typer.Option(help="For tokens in the output, per occurrence.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=VALUE", help="Added to the score of a token id; repeatable.")
]
Seed = Annotated[int, typer.Option(help="Fixes the text at temperature > 0.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from stdin (one final newline is cut).")],
    model: Model = "smollm2-135m",
    drafter: Drafter = "auto",
    rule: Rule = "match",
    device: Device = "auto",
    dtype: DType = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Keep going past the end of the text.")] = False,
    logprobs: Annotated[int, typer.Option(help="Show this many most likely tokens per position.")] = 0,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples; sample i is what seed + i gives.")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="Show every cycle's tree and what was accepted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer one question.

    The prompt is a chat turn: the model's chat template is applied. With --raw, and for models without a
    template, the text is continued as it is. Models without a tokenizer (random:<preset>) take and give token
    ids: "5 17".
    """
    from specengine.engine.engine import Engine
    from specengine.types import SamplingParams

    params = SamplingParams.among({**locals(), "logit_bias": _parse_bias(logit_bias or [])})
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    engine = Engine(model, drafter=drafter, rule=rule, device=device, dtype=dtype)
    request = _prompt(prompt, system, raw, engine.model)
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
    token_text = engine.tokenizer.token_text if engine.tokenizer else str
    for number, output in enumerate(outputs, start=1):
        if n > 1:
            write(f"[{number}/{n}]\n{output.text if engine.tokenizer else _spelled(output.token_ids)}\n")
        show_trace(output.trace or (), token_text)
        show_logprobs(output.logprobs or (), token_text)
    note(summary(outputs, seconds, engine.drafter.name))


@app.command()
def chat(
    model: Model = "smollm2-135m",
    drafter: Drafter = "auto",
    rule: Rule = "match",
    device: Device = "auto",
    dtype: DType = "auto",
    system: System = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = 0,
) -> None:
    """Talk with a model; accepted draft tokens are green.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    from specengine.cli.chat import Chat
    from specengine.engine.engine import Engine
    from specengine.types import SamplingParams

    params = SamplingParams.among({**locals(), "logit_bias": _parse_bias(logit_bias or [])})
    Chat(Engine(model, drafter=drafter, rule=rule, device=device, dtype=dtype), params, system).run()


@app.command()
def serve(
    model: Model = "smollm2-135m",
    drafter: Drafter = "auto",
    rule: Rule = "match",
    device: Device = "auto",
    dtype: DType = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="Processes that share the model's layers, on the CPU.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; the default reaches this machine alone.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name in the API; the last part of --model.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="SPECENGINE_API_KEY", help="Asked of requests; others see options, not variables.")
    ] = "",
    allow_drafter: Annotated[list[str] | None, typer.Option(help="That requests may ask for; repeatable.")] = None,
    allow_rule: Annotated[list[str] | None, typer.Option(help="That requests may ask for; repeatable.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Name the server may be called by; repeatable.")] = None,
    max_batch_size: Annotated[int, typer.Option(help="Texts that share a cycle.")] = 16,
    prefix_cache_mib: Annotated[int, typer.Option(help="Memory for what prompts have in common; 0 for none.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.")] = 1 << 20,
    max_prompt_tokens: Annotated[int, typer.Option(help="Of a prompt; 0: the model's context.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Of a text; 0: the model's context.")] = 0,
    max_streams: Annotated[int, typer.Option(help="Requests answered at a time; more get 429.")] = 128,
    max_waiting: Annotated[int, typer.Option(help="Texts in the queue of an engine; more get 503.")] = 256,
    max_engines: Annotated[int, typer.Option(help="Pairs of a drafter and a rule kept ready.")] = 4,
    deadline: Annotated[float, typer.Option(help="Seconds after which a text ends where it is.")] = 300.0,
    drain: Annotated[float, typer.Option(help="Seconds that texts under way get after SIGTERM.")] = 330.0,
) -> None:
    """Serve a model to OpenAI's clients, with a page to chat at / (needs the extra `serve`).

    SIGTERM and Ctrl-C let the texts under way come to their end.
    """
    try:
        from specengine.server.command import serve as run
    except ModuleNotFoundError as error:
        if str(error.name).startswith("specengine"):
            raise
        raise ValueError(f"serve: needs {error.name}; pip install 'specengine[serve]'") from error
    from specengine.server.settings import Settings, offered

    given = {**locals(), "hosts": tuple(allow_host or ())}
    given |= offered(model, drafter, rule, allow_drafter or (), allow_rule or ()) | ({"name": name} if name else {})
    run(model, device, dtype, tensor_parallel, Settings(**{f.name: given[f.name] for f in fields(Settings)}))


@app.command()
def models(
    check: Annotated[bool, typer.Option("--check", help="Verify cached files against their SHA-256.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List the models that need no path: embedded ones, and presets of random weights.

    --check exits with 1 if a cached file is damaged.
    """
    from specengine.cli.models import embedded_models, random_presets, show_models

    embedded, presets = embedded_models(check), random_presets()
    if as_json:
        typer.echo(json.dumps({"embedded": embedded, "random": presets}))
    else:
        show_models(embedded, presets)
    if any(entry["state"] == "damaged" for entry in embedded):
        raise typer.Exit(1)


@app.command()
def train(
    drafter: Annotated[
        str, typer.Option(help="fasteagle, eagle, eagle3, medusa, glide or draft-model[,option=value...].")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the drafter; a run that was stopped there goes on.")],
    target: Model = "smollm2-135m",
    prompts: Annotated[Path | None, typer.Option(help="JSONL with `turns` or `prompt`; else the target asks.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of dialogues, filled where needed; OUT/data.")] = None,
    start: Annotated[Path | None, typer.Option(help="Go on from the drafter of this folder, on other data.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of all answers.")] = 1_000_000,
    answer_tokens: Annotated[int, typer.Option(help="Of an answer, at most.")] = 256,
    everything: Annotated[bool, typer.Option("--everything", help="Learn questions too.")] = False,
    vocabulary: Annotated[int, typer.Option(help="The drafter knows so many frequent tokens; 0: all.")] = 8192,
    epochs: Annotated[int, typer.Option(help="Times every dialogue is seen.")] = 1,
    learning_rate: Annotated[float | None, typer.Option(help="The drafter's own if not given.")] = None,
    schedule: Annotated[str, typer.Option(help="How the rate falls: cosine or linear.")] = "cosine",
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the rate rises.")] = 0.03,
    batch_tokens: Annotated[int, typer.Option(help="To learn per step.")] = 2048,
    rows: Annotated[int, typer.Option(help="Of one pass; lower needs less memory.")] = 2048,
    held_out: Annotated[int, typer.Option(help="Dialogues for evaluation alone.")] = 64,
    evaluate_steps: Annotated[int, typer.Option(help="Steps between two evaluations.")] = 100,
    save_steps: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 100,
    minutes: Annotated[float, typer.Option(help="Stop after so many, to be resumed; 0: never.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of data, split, order and weights.")] = 0,
    store: Annotated[str, typer.Option(help="The target's states: on disk, in memory, or none (made anew).")] = "disk",
    storage: Annotated[str, typer.Option(help="Of the drafter: bfloat16, int8 or float32.")] = "bfloat16",
    precision: Annotated[str, typer.Option(help="auto (bfloat16 on CUDA), float32 or bfloat16.")] = "auto",
    device: Device = "auto",
    dtype: DType = "auto",
) -> None:
    """Train a drafter on text that the target writes itself.

    Ctrl-C stops after the step; the same command resumes. Under torchrun all processes train together.
    """
    from specengine.train.command import TrainJob, outcome_line
    from specengine.train.command import train as run
    from specengine.train.config import TrainConfig
    from specengine.train.data.dialogues import DialogueConfig

    given = {**locals(), "dialogues": DialogueConfig(seed, answer_tokens=answer_tokens)}
    given["config"] = TrainConfig(**{f.name: given[f.name] for f in fields(TrainConfig) if f.name in given})
    request = TrainJob(**{f.name: given[f.name] for f in fields(TrainJob) if f.name in given})
    note(outcome_line(run(request), out))


@app.command()
def corpus(
    files: Annotated[list[Path], typer.Argument(help="Texts, JSONL with `text`, or folders of train's data.")],
    out: Annotated[Path, typer.Option(help="File of the corpus, for --drafter suffix:FILE.")],
    model: Model = "smollm2-135m",
) -> None:
    """Make a corpus of texts, from which the drafter `suffix` copies."""
    from specengine.cli.corpus_texts import make_corpus

    note(f"{make_corpus(model, files, out)} tokens in {out}")


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="JSON files of python -m specengine.bench --json.")],
    out: Annotated[Path, typer.Option(help="The report, one HTML file that needs nothing else.")],
    pictures: Annotated[Path | None, typer.Option(help="Also its pictures as PNG files, in this folder.")] = None,
) -> None:
    """Compare recorded runs side by side, with pictures (needs matplotlib)."""
    from specengine.bench.report.html import write_report

    write_report(results, out, pictures)
    note(f"{len(results)} results in {out}")


def _parse_bias(pairs: list[str]) -> dict[int, float] | None:
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


def _prompt(text: str, system: str | None, raw: bool, model: LoadedModel) -> Prompt:
    """What the engine is asked: chat messages where the model has a template, else text or token ids."""
    chat = model.tokenizer is not None and model.tokenizer.has_chat_template and not raw
    if system is not None and not chat:
        raise ValueError("system: needs a model with a chat template, and no --raw")
    if chat:
        turns = [("system", system), ("user", text)] if system is not None else [("user", text)]
        return [{"role": role, "content": content} for role, content in turns]
    if model.tokenizer is not None:
        return text
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(
            f"prompt: {model.name} has no tokenizer; expected token ids such as '5 17', got {text[:80]!r}"
        ) from None


def _spelled(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


def _stream(engine: Engine, prompt: Prompt, params: SamplingParams) -> GenerationOutput:
    """Writes text (token ids where there is no tokenizer) as it comes and ends the line."""
    for event in engine.stream(prompt, params):
        write(event.text if engine.tokenizer else f"{_spelled(event.token_ids)} ")
    write("\n")
    assert event.output is not None  # of the last
    return event.output


def main() -> None:
    """Entry point of the console script; Ctrl-C while torch is still loading ends without a traceback too."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
