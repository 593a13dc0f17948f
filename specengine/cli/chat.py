"""An interactive conversation in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from specengine.cli.console import ACCEPTED
from specengine.utils.console import note, show_error

if TYPE_CHECKING:
    from specengine.engine.engine import Engine
    from specengine.types import GenerationOutput, SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class Chat:
    """FairLock of a conversation with one engine; accepted draft tokens are shown in green.

    Raises ValueError for a model that has no chat template.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise ValueError(f"model: {engine.model.name} has no chat template, so there is no chat with it")
        self.engine, self.params, self._tokenizer = engine, params, engine.tokenizer
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def run(self) -> None:
        """Reads lines from stdin until it ends or says /exit."""
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (gives `input` line editing and a history)
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
                note("the conversation starts anew")
            elif line.startswith("/"):
                note(f"unknown command {line.split()[0]}; {HELP}")
            elif line:
                self.answer(line)

    def answer(self, question: str) -> None:
        """Streams the answer to a question; one that cannot be asked leaves the conversation as it was."""
        self.messages.append({"role": "user", "content": question})
        begin = time.perf_counter()
        try:
            text, output = self._stream()
        except (ValueError, MemoryError) as error:
            self.messages.pop()
            show_error(error)
            note("this question was dropped; /reset makes room by forgetting the conversation")
            return
        self.messages.append({"role": "assistant", "content": text})
        if output is None:
            note("stopped")
            return
        tokens, seconds = len(output.token_ids), time.perf_counter() - begin
        ended = "" if output.finish_reason == "stop" else f", {self._cut(output)}"
        note(f"tau {output.stats.tau:.2f}, {tokens / seconds:.1f} tokens/s{ended}")

    def _stream(self) -> tuple[str, GenerationOutput | None]:
        """Shows an answer as it comes; gives its text, and no output if Ctrl-C stopped it."""
        text, output = "", None
        # Events carry whole characters; to colour within one, its tokens are turned into text here.
        pieces = self._tokenizer.detokenizer()
        events = self.engine.stream(self.messages, self.params)
        try:
            for event in events:
                drafted, bonus = event.token_ids[: event.accepted], event.token_ids[event.accepted :]
                output = event.output
                for ids, colour in ((drafted, ACCEPTED), (bonus, None)):
                    piece = pieces.feed(ids)
                    text += piece
                    if piece:
                        typer.secho(piece, fg=colour, nl=False)
            rest = pieces.finish()
            text += rest
            typer.echo(rest)
        except KeyboardInterrupt:
            events.close()  # gives the request's memory back
            typer.echo()
        return text, output

    def _cut(self, output: GenerationOutput) -> str:
        used = len(output.prompt_token_ids) + len(output.token_ids)
        if used >= self.engine.model.config.max_position:
            return f"cut: the model's context of {used} tokens is full (/reset makes room)"
        return f"cut at {len(output.token_ids)} tokens (--max-new-tokens)"
