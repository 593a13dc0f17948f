"""A tiny target, text with a pattern to learn, and training runs on both."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.train.config import TrainConfig
from specengine.train.data.corpus import Corpus
from specengine.train.data.dialogue_files import Dialogue, write_shard
from specengine.train.data.state_store import StateStore
from specengine.train.data.target_states import TargetPasses
from specengine.train.loss_passes import LossPasses
from specengine.train.objectives.fasteagle import FastEagleObjective, FastEagleOptions
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.process_group import ProcessGroup
from specengine.train.trainer import Trainer

CPU = torch.device("cpu")
CONFIG = replace(PRESETS["tiny-llama"], num_layers=7, vocab_size=96)
SHORT = TrainConfig(epochs=2, learning_rate=2e-3, batch_tokens=64, rows=96, held_out=3, evaluate_steps=2, save_steps=3)
CHECKPOINT = RandomCheckpoint(CONFIG, source="random:seven-layers")
TARGET = load_transformer(CHECKPOINT, "float32", CPU)


def target_weights(vocabulary: torch.Tensor | None = None) -> TargetWeights:
    embedding = CHECKPOINT.read("model.embed_tokens.weight").float()
    name = "model.embed_tokens.weight" if CONFIG.tie_embeddings else "lm_head.weight"
    head = CHECKPOINT.read(name).float()
    head = head if vocabulary is None else head[vocabulary]
    return TargetWeights(CONFIG, embedding, head, vocabulary, lambda name: CHECKPOINT.read(name).float())


def dialogues(count: int, seed: int = 0) -> list[Dialogue]:
    """Makes questions of random tokens, and answers that count up from a random token."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        question = [draw.randrange(CONFIG.vocab_size) for _ in range(draw.randrange(3, 8))]
        first = draw.randrange(CONFIG.vocab_size)
        answer = [(first + i) % CONFIG.vocab_size for i in range(draw.randrange(12, 24))]
        made.append(Dialogue(question + answer, len(question)))
    return made


def corpus(folder: Path, count: int = 16, **options: Any) -> Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dialogues-00000.safetensors"
    if not path.exists():
        write_shard(path, dialogues(count), {})
    return Corpus([path], SHORT.held_out, 0, **options)


def objective(seed: int = 0, options: FastEagleOptions | None = None) -> FastEagleObjective:
    torch.manual_seed(seed)
    return FastEagleObjective(target_weights(), options or FastEagleOptions(levels=3, cross_entropy=1.0))


def trainer(
    out: Path,
    config: TrainConfig = SHORT,
    *,
    processes: ProcessGroup | None = None,
    made: Any = None,
    about: dict | None = None,
    publish: Callable = lambda report, tokens: None,
    show: Callable = lambda progress: None,
) -> Trainer:
    torch.set_num_threads(1)
    made = made or objective()
    store = StateStore(TargetPasses(TARGET, made.hidden_state_layers, made.kv_layers).of, None, {})
    options = {"about": about or {}, "publish": publish, "show": show}
    passes = LossPasses(made, corpus(out.parent / "data"), store.states, config, processes or ProcessGroup(CPU))
    return Trainer(passes, out, **options)
