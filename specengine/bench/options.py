"""Options of `python -m specengine.bench`, with their defaults and checks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from specengine.bench.gpu_model.constants import gpu_of
from specengine.bench.kernels.rows import PREFIX
from specengine.bench.presets.catalog import PRESETS, named
from specengine.bench.race.questions import BUILT_IN, RANDOM_TOKENS, SCHEMAS, Question, load_files
from specengine.bench.report.plot import check_matplotlib
from specengine.types import SamplingParams
from specengine.utils.spec_string import parse_named_paths

MODEL = "smollm2-135m"
GPU_MODEL = "random:llama-3.1-8b"
DRAFTERS = "none,prompt_lookup"


@dataclass(frozen=True)
class Options:
    """Holds the options as given; the field order is that of `--help`."""

    model: Annotated[
        str | None,
        typer.Option(
            show_default=MODEL,
            help=f"As for `specengine generate`. A preset on a GPU takes {GPU_MODEL} by default.",
        ),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Measure the contenders of a published table, and show published beside measured numbers: "
            f"{', '.join(PRESETS)}. --temperature and --batch replace those of the preset.",
        ),
    ] = None
    drafters: Annotated[
        str | None,
        typer.Option(
            show_default=DRAFTERS,
            help="Drafters separated by commas. An item option=value belongs to the drafter before it: "
            "none,prompt_lookup,nodes=16. none is always included. synthetic:0.8,0.7,k=10 drafts levels of k tokens, "
            "accepted with these probabilities, which changes the text. control is plain decoding in a second "
            "engine: its speedup shows the noise around 1.",
        ),
    ] = None
    peers: Annotated[
        str,
        typer.Option(
            help="Other engines in the same race, at batch 1: transformers, llama.cpp. A colon and a weight format may "
            "follow: llama.cpp:Q8_0, transformers:bfloat16. A peer that cannot run is left out with a reason."
        ),
    ] = ""
    questions: Annotated[
        str | None,
        typer.Option(
            help="JSONL files in MT-bench form, separated by commas: one object with `turns` per line. `category` "
            "defaults to the file's name, `json_schema` constrains the answers. `schemas` is the package's own file of "
            "sixty such questions. The default is the package's other questions."
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(help="At most this many questions of each file.")] = None
    per_class: Annotated[int | None, typer.Option(help="At most this many questions of each class.")] = None
    prompt_tokens: Annotated[int, typer.Option(help="Random tokens of a turn, for a model without a tokenizer.")] = (
        RANDOM_TOKENS
    )
    max_new_tokens: Annotated[int, typer.Option(help="Per turn.")] = 128
    temperature: Annotated[
        str | None,
        typer.Option(show_default="0", help="Temperatures separated by commas. Peers sample with their own samplers."),
    ] = None
    batch: Annotated[str | None, typer.Option(show_default="1", help="Batch sizes separated by commas.")] = None
    repetitions: int = 3
    rule: Annotated[str | None, typer.Option(show_default="match", help="The verification rule of all drafters.")] = (
        None
    )
    rules: Annotated[
        str | None,
        typer.Option(
            help="Instead, compare rules and the quality of their text. Rules are separated by spaces and values by "
            "slashes: 'margin:theta=0.84/0.9 cascade:opt,alpha=0.1'. Each rule gets the first drafter that serves it, "
            "and the exact rule as reference. token-cascade:chow and seq-cascade:chow are sequential."
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG",
            help="Write a picture of acceptance by depth, tau, speedup and the time of a cycle. With --rules, draw "
            "quality against speed (needs matplotlib).",
        ),
    ] = None
    adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME=PATH", help="PEFT LoRA folder, with which the target answers under every drafter."),
    ] = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate --max-new-tokens tokens for every answer.")
    ] = False
    prefill: Annotated[int | None, typer.Option(help="Also time a prompt of this many tokens.")] = None
    rows: Annotated[str, typer.Option(help="Also time a pass by its number of rows: 1,2,4,8,16,32.")] = ""
    prefix: Annotated[int, typer.Option(help="Cached tokens before the rows of --rows.")] = PREFIX
    memory: Annotated[
        bool, typer.Option("--memory", help="Also measure each drafter's peak memory, in a process of its own.")
    ] = False
    perplexity: Annotated[
        bool,
        typer.Option("--perplexity", help="Only measure the model's perplexity in every dtype (or in --dtype)."),
    ] = False
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Only time every kernel of the device beside PyTorch and its memory traffic."),
    ] = False
    gpu_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only model the cycles of Llama-3.1-8B on a GPU, without one: h200, or a JSON file with constants in "
            "place of its own.",
        ),
    ] = None
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the results here.")] = None

    def check(self) -> None:
        """Raises ValueError for an unwritable file, an unknown preset, and options that exclude each other."""
        for name, file in (("json", self.json_file), ("plot", self.plot)):
            if file and not (file.absolute().parent.is_dir() and os.access(file.absolute().parent, os.W_OK)):
                raise ValueError(f"{name}: cannot write {str(file)!r}, its folder does not exist or is read-only")
        if self.plot:
            if self.kernels or self.perplexity or self.gpu_model:
                raise ValueError(
                    "plot: expected a run of drafters or rules, not --kernels, --perplexity or --gpu-model"
                )
            check_matplotlib()
        if self.gpu_model:
            gpu_of(self.gpu_model)
            own = ("gpu_model", "json_file")
            given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
            if others := [name for name in given if name not in own]:
                named_others = ", ".join(f"--{name.replace('_', '-')}" for name in others)
                raise ValueError(f"gpu-model: measures nothing, so only --json goes with it, not {named_others}")
        if self.adapter:
            excluded = ("peers", "preset", "rules", "memory", "perplexity", "kernels", "prefill")
            if other := next((name for name in excluded if getattr(self, name)), None):
                raise ValueError(f"adapter: drafters alone are measured with it, not --{other}")
        if self.preset:
            named(self.preset)
            if self.drafters or self.rule or self.rules or self.kernels or self.perplexity:
                raise ValueError("preset: has drafters and rules of its own, and measures nothing else")

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of all answers, at temperature 0."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            adapter=next(iter(self.adapters), None),
        )

    @property
    def adapters(self) -> dict[str, str]:
        """The adapter's folder by its name, if there is one. Raises ValueError for another form than NAME=PATH."""
        return parse_named_paths("adapter", [self.adapter])

    @property
    def question_files(self) -> list[Path]:
        """Files of questions."""
        names = [part.strip() for part in self.questions.split(",")] if self.questions else []
        return [SCHEMAS if name == "schemas" else Path(name) for name in names] or [BUILT_IN]

    def load_questions(self) -> list[Question]:
        """Reads all questions. Raises FileNotFoundError, or ValueError naming file and line."""
        return load_files(self.question_files, self.limit, self.per_class, self.prompt_tokens)


def parse_numbers(name: str, text: str, kind: type = int) -> list:
    """Splits different numbers at commas. Raises ValueError naming the option."""
    try:
        return list(dict.fromkeys(kind(number) for number in text.split(",")))
    except ValueError:
        raise ValueError(f"{name}: expected numbers separated by commas, got {text!r}") from None


def takes_options(run: Callable[[Options], None]) -> Callable[..., None]:
    """Returns a function with one keyword parameter per field of Options, which is what typer reads options from."""

    def command(**given: Any) -> None:
        run(Options(**given))

    hints = get_type_hints(Options, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name])
        for each in fields(Options)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    command.__doc__ = run.__doc__
    return command
