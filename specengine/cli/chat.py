"""`specengine chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from specengine.cli import options
from specengine.cli.console import ACCEPTED
from specengine.utils.console import note, show_error
from specengine.utils.spec_string import parse_named_paths

if TYPE_CHECKING:
    from specengine.engine.engine import Engine
    from specengine.types import GenerationOutput, SamplingParams

HELP = "/reset clears the conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer"


def chat(
    model: options.Model = "smollm2-135m",
    drafter: options.Drafter = "auto",
    rule: options.Rule = "match",
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = 0,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.Grammar = None,
    choices: options.Choices = None,
    adapter: options.Adapter = None,
) -> None:
    """Chat with a model; accepted draft tokens are green.

    /reset clears the conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer.
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
    engine = Engine(model, drafter=drafter, rule=rule, device=device, dtype=dtype, adapters=adapters or None)
    Chat(engine, params, system).run()


class Chat:
    """A conversation with one engine. It shows accepted draft tokens in green.

    Raises ValueError for a model without a chat template.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise ValueError(f"model: {engine.model.name} has no chat template, which chat needs")
        self.engine = engine
        self.params = params
        self._tokenizer = engine.tokenizer
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def run(self) -> None:
        """Answers lines from stdin until end of file or /exit."""
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (adds line editing and history to `input`)
            note(f"{self.engine.model.name}, drafter {self.engine.drafter.name}; {HELP}")
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not interactive:
                    raise
                note(f"\n{HELP}")
                continue
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self._opening)
                note("conversation cleared")
            elif line.startswith("/"):
                note(f"unknown command {line.split()[0]}; {HELP}")
            elif line:
                self.answer(line)

    def answer(self, question: str) -> None:
        """Streams the answer to a question. A question that the engine refuses leaves the conversation unchanged."""
        self.messages.append({"role": "user", "content": question})
        begin = time.perf_counter()
        try:
            text, output = self._stream()
        except (ValueError, MemoryError) as error:
            self.messages.pop()
            show_error(error)
            note("question dropped; /reset clears the conversation and frees its context")
            return
        self.messages.append({"role": "assistant", "content": text})
        if output is None:
            note("stopped")
            return
        seconds = time.perf_counter() - begin
        cut = "" if output.finish_reason == "stop" else f", {self._why_cut(output)}"
        note(f"tau {output.stats.tau:.2f}, {len(output.token_ids) / seconds:.1f} tokens/s{cut}")

    def _stream(self) -> tuple[str, GenerationOutput | None]:
        """Shows an answer while it is generated. Returns its text, and no output if Ctrl-C stopped it."""
        text, output = "", None
        # An event's text cannot be split at the accepted tokens, so this method decodes the tokens itself.
        detokenizer = self._tokenizer.detokenizer()
        events = self.engine.stream(self.messages, self.params)
        try:
            for event in events:
                drafted, bonus = event.token_ids[: event.accepted], event.token_ids[event.accepted :]
                output = event.output
                for ids, colour in ((drafted, ACCEPTED), (bonus, None)):
                    piece = detokenizer.feed(ids)
                    text += piece
                    if piece:
                        typer.secho(piece, fg=colour, nl=False)
            rest = detokenizer.finish()
            text += rest
            typer.echo(rest)
        except KeyboardInterrupt:
            events.close()  # frees the request's cache pages
            typer.echo()
        return text, output

    def _why_cut(self, output: GenerationOutput) -> str:
        used = len(output.prompt_token_ids) + len(output.token_ids)
        if used >= self.engine.model.config.max_position:
            return f"cut: the model's context of {used} tokens is full (/reset clears it)"
        return f"cut at {len(output.token_ids)} tokens (--max-new-tokens)"
