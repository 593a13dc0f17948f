"""`specengine serve`: starts the HTTP server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated

import typer

from specengine.cli import options
from specengine.utils.spec_string import parse_named_paths


def serve(
    model: options.Model = "smollm2-135m",
    drafter: options.Drafter = "auto",
    rule: options.Rule = "match",
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    tensor_parallel: Annotated[
        int, typer.Option(help="Processes that share the model's layers, on CUDA a GPU each.")
    ] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; the default accepts this machine only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API; by default the last part of --model.")
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="SPECENGINE_API_KEY",
            help="Key that requests must carry. Other users can see options, but not variables.",
        ),
    ] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="PEFT LoRA folder that requests choose as model NAME; repeatable."),
    ] = None,
    allow_drafter: Annotated[list[str] | None, typer.Option(help="Drafter that requests may name; repeatable.")] = None,
    allow_rule: Annotated[list[str] | None, typer.Option(help="Rule that requests may name; repeatable.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Host name that requests may use; repeatable.")] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that browsers let use the server, or *; repeatable, or a JSON list."),
    ] = None,
    ignore_unknown_fields: Annotated[
        bool, typer.Option("--ignore-unknown-fields", help="Log unknown fields of requests, do not refuse them.")
    ] = False,
    max_batch_size: Annotated[int, typer.Option(help="Texts that share a batch; others wait.")] = 16,
    prefix_cache_mib: Annotated[int, typer.Option(help="Memory for cached prompt prefixes; 0 is off.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Size limit of a request's body.")] = 1 << 20,
    max_prompt_tokens: Annotated[int, typer.Option(help="Length limit of a prompt; 0: the model's context.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit of a generated text; 0: the model's context.")] = 0,
    max_streams: Annotated[int, typer.Option(help="Requests that run at a time; others get 429.")] = 128,
    max_waiting: Annotated[int, typer.Option(help="Texts that wait for a place in a batch; others get 503.")] = 256,
    max_engines: Annotated[int, typer.Option(help="Pairs of a drafter and a rule that stay loaded.")] = 4,
    deadline: Annotated[float, typer.Option(help="Seconds after which a text is cut.")] = 300.0,
    tool_dialect: Annotated[
        str, typer.Option(help="How the model writes tool calls; `auto` reads it from the chat template.")
    ] = "auto",
    reasoning: Annotated[
        str, typer.Option(help="Tags around the model's reasoning: think, mistral, none, or auto.")
    ] = "auto",
    drain: Annotated[float, typer.Option(help="Seconds that running texts get after SIGTERM.")] = 330.0,
) -> None:
    """Serve a model to OpenAI clients, with a chat page at / (needs the extra `serve`).

    On SIGTERM or Ctrl-C the server finishes the running texts before it exits.
    """
    try:
        from specengine.server.command import serve as run
    except ModuleNotFoundError as error:
        if str(error.name).startswith("specengine"):
            raise
        raise ValueError(f"serve: needs {error.name}; pip install 'specengine[serve]'") from error
    from specengine.server.settings import Settings, derive_settings

    given = {**locals(), "hosts": tuple(allow_host or ()), "adapters": parse_named_paths("adapter", adapter or [])}
    given["allowed_origins"] = tuple(_read_origins(allowed_origins or []))
    given |= derive_settings(model, drafter, rule, allow_drafter or (), allow_rule or ())
    if name:
        given["name"] = name
    run(model, device, dtype, tensor_parallel, Settings(**{f.name: given[f.name] for f in fields(Settings)}))


def _read_origins(values: list[str]) -> Iterator[str]:
    """Yields origins, one of each value or several of a JSON list, as vLLM's option of this name takes them."""
    for value in values:
        if not value.startswith("["):
            yield value
            continue
        try:
            origins = json.loads(value)
        except ValueError as error:
            raise ValueError(f"allowed_origins: {value!r} is not a JSON list ({error})") from error
        yield from map(str, origins)
