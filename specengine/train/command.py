"""`specengine train`: makes the data, trains the drafter and publishes it."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from specengine.drafters.shipped import FINGERPRINT, fingerprint
from specengine.models.quantised.packed_weights import FILENAME
from specengine.tensor_parallel.loading import LoadedModel, load_model
from specengine.train.data.corpus import Corpus
from specengine.train.data.dialogues import read_questions, write_dialogues
from specengine.train.data.state_store import StateStore
from specengine.train.data.target_states import TargetPasses
from specengine.train.export import WEIGHTS, write_drafter
from specengine.train.job import TrainJob
from specengine.train.loss_passes import LossPasses
from specengine.train.model_card import model_card
from specengine.train.objectives.base import Objective
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.registry import new_objective, objective_class
from specengine.train.objectives.target_weights import load_target_weights
from specengine.train.objectives.training_batch import TrainingBatch
from specengine.train.packing import measure, pack
from specengine.train.plot import plot_training
from specengine.train.process_group import ProcessGroup
from specengine.train.progress_bars import ProgressBars
from specengine.train.trainer import Outcome, Trainer
from specengine.train.warm_start import earlier_drafter, warm_start_weights
from specengine.utils.console import note

_MEASURED = 64  # dialogues of training whose gradients tell where rounding costs least


def train(job: TrainJob) -> Outcome:
    """Makes missing data, trains and writes the drafter. Raises ValueError, OSError or MemoryError."""
    _claim(job.out, job.storage)
    questions = read_questions(job.prompts) if job.prompts else None
    model = load_model(job.target, device=job.device, dtype=job.dtype)
    kind, options = objective_class(job.drafter)
    kind.check(model.config, options)
    with ProcessGroup.joined(model.target.device) as processes:
        if processes.device != model.target.device:  # every process has a GPU of its own
            model = load_model(job.target, device="cuda", dtype=job.dtype)
        with ProgressBars(processes.rank == 0) as bars:
            corpus = _corpus(job, model, questions, processes, bars)
            return _train(job, model, corpus, processes, bars)


def _claim(out: Path, storage: str) -> None:
    """Makes the folder before hours of work.

    Raises ValueError for a folder that cannot be written, or that holds a model which the drafter would replace.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: {out} cannot be made: {error.strerror}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"out: {out} cannot be written to")
    if storage != "packed" and (out / FILENAME).exists():
        raise ValueError(f"storage: {out} has packed weights, got {storage}; choose another folder")
    if not (out / "training.jsonl").exists():
        for name in ("config.json", WEIGHTS, FILENAME):
            if (out / name).exists():
                raise ValueError(f"out: {out} has a {name} of another model; choose another folder")


def outcome_line(outcome: Outcome, out: Path) -> str:
    """Describes the end of a run in one line."""
    done = f"step {outcome.step} of {outcome.steps}"
    if outcome.ended != "finished":
        why = "stopped" if outcome.ended == "stopped" else "the minutes are over"
        return f"{why} after {done}; the same command resumes"
    tau = f", held-out tau {outcome.held_out.tau:.2f}" if outcome.held_out else ""
    return f"finished, {done}{tau}; the best is in {out}"


def _corpus(
    job: TrainJob,
    model: LoadedModel,
    questions: list[list[str]] | None,
    processes: ProcessGroup,
    bars: ProgressBars,
) -> Corpus:
    folder = job.data or job.out / "data"
    if processes.rank == 0:
        bars.begin("data", job.tokens)
        write_dialogues(model, folder, job.tokens, job.dialogues, questions=questions, advance=bars.advance)
    processes.barrier()
    shards = write_dialogues(model, folder, job.tokens, job.dialogues, questions=questions)
    config = job.config
    return Corpus(shards, config.held_out, config.seed, longest=job.longest, everything=job.everything)


def _train(job: TrainJob, model: LoadedModel, corpus: Corpus, processes: ProcessGroup, bars: ProgressBars) -> Outcome:
    config = job.config
    start = job.start
    vocabulary = _vocabulary(job, model, corpus)
    torch.manual_seed(config.seed)
    objective = new_objective(job.drafter, load_target_weights(job.target, vocabulary, processes.device))
    target = TargetPasses(model.target, objective.hidden_state_layers, objective.kv_layers)
    # metadata of the stored states: other keys would not find the folders of earlier runs
    about = {
        "target": job.target,
        "taps": str(objective.hidden_state_layers),
        "layers": str(objective.kv_layers),
    }
    folder = (job.data or job.out / "data") / "states" / _slug(about)
    store = StateStore(target.of, folder if job.store == "disk" else None, about)
    states = store.states if job.store != "none" else lambda number, dialogue: target.of(dialogue.tokens)
    trainer = Trainer(
        LossPasses(objective, corpus, states, config, processes),
        job.out,
        about={
            "drafter": job.drafter,
            "target": job.target,
            "vocabulary": "start" if job.keep_vocabulary else job.vocabulary,
            "start": str(job.start or ""),
            "batch_tokens": config.batch_tokens,
            "seed": config.seed,
            "everything": job.everything,
            "longest": job.longest,
            "schedule": config.schedule,
            "dtype": job.dtype,
            "processes": processes.size,
        },
        weights=None if start is None else lambda: warm_start_weights(start, objective, model.config),
        publish=lambda report, tokens: _publish(job, model, objective, corpus, report, tokens),
        show=bars.show,
    )
    bars.begin("training", trainer.steps)
    outcome = trainer.run()
    if processes.rank == 0:
        if outcome.steps:
            _picture(job.out)
        if job.storage == "packed" and outcome.ended == "finished":
            pieces = corpus.training[:_MEASURED]
            batches = (corpus.batch([each], states, processes.device) for each in pieces)
            _pack(job, objective, batches)
    return outcome


def _pack(job: TrainJob, objective: Objective, batches: Iterable[TrainingBatch]) -> None:
    """Replaces the published int8 weights by packed ones, unless an earlier run has done so."""
    if not (job.out / WEIGHTS).exists():
        note(f"{job.out} was packed by an earlier run; another --rise or --base takes effect in another folder")
        return
    best = earlier_drafter(job.out)
    tensors = {name: best.read(name) for name in best.tensors}
    tensors = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
    floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
    pack(job.out / FILENAME, tensors, measure(objective, floats, batches), job.rise, job.bases)
    (job.out / WEIGHTS).unlink()


def _vocabulary(job: TrainJob, model: LoadedModel, corpus: Corpus) -> torch.Tensor | None:
    """Chooses the drafter's tokens; None for all."""
    if job.keep_vocabulary and job.start is not None:
        tokens = earlier_drafter(job.start).vocabulary(model.config)
        if tokens is not None and not torch.all(tokens[1:] > tokens[:-1]):
            raise ValueError("keep-vocabulary: expected rising tokens in 'd2t' of the drafter that --start names")
        return tokens
    smaller = 0 < job.vocabulary < model.config.vocab_size
    return corpus.frequent_tokens(job.vocabulary) if smaller else None


def _slug(about: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:12]


def _publish(
    job: TrainJob, model: LoadedModel, objective: Objective, corpus: Corpus, report: LevelReport, tokens: int
) -> None:
    config, tensors = objective.export()
    card = model_card(job, corpus, report, tokens, shlex.join(["specengine", *sys.argv[1:]]))
    own = {FINGERPRINT: fingerprint(model.target), "trained_length": corpus.longest}
    storage = "int8" if job.storage == "packed" else job.storage  # packed at the end, from these weights
    write_drafter(job.out, config | own, tensors, storage, card)


def _picture(out: Path) -> None:
    try:
        plot_training(out / "training.jsonl", out / "training.png")
    except ModuleNotFoundError:
        note("no picture: matplotlib is missing (pip install '.[plot]' in a clone)")
