"""`specengine train`: trains a drafter."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from specengine.cli import options
from specengine.utils.console import note


def train(
    drafter: Annotated[
        str,
        typer.Option(
            help="dflash, draft-model, dspark, eagle, eagle3, fasteagle, glide, jetspec or medusa[,option=value...]."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the drafter; a stopped run resumes there.")],
    target: options.Model = "smollm2-135m",
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL with `turns` or `prompt`; by default the target writes the questions."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of dialogues, filled if needed; OUT/data by default.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Start from the drafter in this folder, on other data.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of all answers together.")] = 1_000_000,
    answer_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 256,
    everything: Annotated[bool, typer.Option("--everything", help="Train on the questions too.")] = False,
    vocabulary: Annotated[int, typer.Option(help="Number of frequent tokens the drafter knows; 0: all.")] = 8192,
    keep_vocabulary: Annotated[
        bool, typer.Option("--keep-vocabulary", help="Know the tokens of the drafter that --start names.")
    ] = False,
    epochs: Annotated[int, typer.Option(help="Passes over the dialogues; 0: only write the first weights.")] = 1,
    learning_rate: Annotated[float | None, typer.Option(help="By default the drafter's own rate.")] = None,
    schedule: Annotated[str, typer.Option(help="Decay of the learning rate: cosine or linear.")] = "cosine",
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the learning rate rises.")] = 0.03,
    batch_tokens: Annotated[int, typer.Option(help="Tokens trained on per step.")] = 2048,
    rows: Annotated[int, typer.Option(help="Tokens per forward pass; fewer need less memory.")] = 2048,
    held_out: Annotated[int, typer.Option(help="Dialogues kept for evaluation only.")] = 64,
    evaluate_steps: Annotated[int, typer.Option(help="Steps between two evaluations.")] = 100,
    save_steps: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 100,
    minutes: Annotated[float, typer.Option(help="Stop after this many minutes, to be resumed; 0: never.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of dialogues, split, order and weights.")] = 0,
    data_seed: Annotated[int | None, typer.Option(help="Seed of the dialogues alone; by default --seed.")] = None,
    store: Annotated[
        str, typer.Option(help="Store of the target's states: disk, memory, or none (computed again).")
    ] = "disk",
    storage: Annotated[
        str, typer.Option(help="Storage type of the drafter: bfloat16, int8, float32 or packed (few bits).")
    ] = "bfloat16",
    base: Annotated[
        list[str] | None,
        typer.Option(help="Packed: store differences from an embedded model, or from the drafter ../NAME beside OUT."),
    ] = None,
    rise: Annotated[float, typer.Option(help="Packed: what rounding may add to the loss of a token.")] = 0.003,
    precision: Annotated[str, typer.Option(help="auto (bfloat16 on CUDA), float32 or bfloat16.")] = "auto",
    device: options.Device = "auto",
    dtype: options.DType = "auto",
) -> None:
    """Train a drafter on text that the target generates.

    Ctrl-C stops after the current step; the same command resumes. Under torchrun all processes train together.
    """
    from specengine.train.command import outcome_line
    from specengine.train.command import train as run
    from specengine.train.config import TrainConfig
    from specengine.train.data.dialogues import DialogueConfig
    from specengine.train.job import TrainJob

    dialogues = DialogueConfig(seed if data_seed is None else data_seed, answer_tokens=answer_tokens)
    given = {**locals(), "dialogues": dialogues, "bases": tuple(base or ())}
    given["config"] = TrainConfig(**{f.name: given[f.name] for f in fields(TrainConfig) if f.name in given})
    job = TrainJob(**{f.name: given[f.name] for f in fields(TrainJob) if f.name in given})
    note(outcome_line(run(job), out))
