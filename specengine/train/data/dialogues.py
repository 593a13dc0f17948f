"""Training data that the target makes itself: it writes a question, or is given one, and answers it.

A shard is a safetensors file of some dialogues. What is in it depends on the seed and its number alone, and it appears
whole or not at all, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specengine.engine.engine import Engine
from specengine.rules.base import check_number
from specengine.tensor_parallel.loading import LoadedModel
from specengine.tokenizer import Tokenizer
from specengine.types import Message, SamplingParams
from specengine.utils.atomic_file import atomic_file
from specengine.utils.spec_string import check_range

_MARK = "specengine-question"  # where a question's words stand in a rendered chat
_SEEDS = 1_000_003  # between two shards
_QUESTIONS = SamplingParams(temperature=1.0, top_p=0.95)


@dataclass(frozen=True)
class DialogueConfig:
    """temperatures: of the answers, in turn.  question_tokens, answer_tokens: at most.  dialogues: of a shard."""

    seed: int = 0
    dialogues: int = 64
    question_tokens: int = 96
    answer_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.8)

    def __post_init__(self) -> None:
        for name in ("dialogues", "question_tokens", "answer_tokens"):
            check_range(name, getattr(self, name), 1, 1 << 16)
        check_range("seed", self.seed, 0, 1 << 40)
        for temperature in self.temperatures:
            check_number("temperatures", temperature, 0, 100)


@dataclass(frozen=True)
class Dialogue:
    """tokens: prompt and answer.  answer: where it begins, the first one of several turns."""

    tokens: list[int]
    answer: int


def question_prefix(tokenizer: Tokenizer) -> list[int]:
    """The tokens of a chat up to where the user's words begin. Raises ValueError for a model without chat template."""
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    return tokenizer.encode(text.partition(_MARK)[0], add_special_tokens=False)


def read_questions(path: Path) -> list[list[str]]:
    """The user's turns of each line of a JSONL file: its `turns` or `prompt`. Raises ValueError naming the line."""
    questions = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            turns = [data["prompt"]] if "prompt" in data else data["turns"]
        except (ValueError, TypeError, KeyError):
            turns = []
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"prompts: {path}, line {number}: expected an object with `turns` or `prompt`, texts")
        questions.append(turns)
    if not questions:
        raise ValueError(f"prompts: {path} holds no questions")
    return questions


def write_dialogues(
    model: LoadedModel,
    folder: Path,
    tokens: int,
    config: DialogueConfig | None = None,
    *,
    questions: Sequence[Sequence[str]] | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[Path]:
    """Writes shards until their answers have `tokens` tokens in all or every question is answered; returns the paths.

    Shards that are there are kept. advance: told the answer tokens of each shard.
    Raises ValueError for shards of another model or config, and for a model without chat template.
    """
    config = config or DialogueConfig()
    asked = "0" if questions is None else hashlib.sha256(json.dumps(list(questions)).encode()).hexdigest()[:16]
    about = {"model": model.name, "config": json.dumps(asdict(config)), "questions": asked}
    _check_lengths(model, questions or (), config)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    found, engine = 0, None
    while found < tokens and (questions is None or len(paths) * config.dialogues < len(questions)):
        path = folder / f"dialogues-{len(paths):05d}.safetensors"
        if not path.exists():
            first = len(paths) * config.dialogues
            own = None if questions is None else questions[first : first + config.dialogues]
            engine = engine or _engine(model, config)
            write_shard(path, _dialogues(engine, len(paths), config, own), about)
        elif (there := _metadata(path)) != about:
            raise ValueError(f"data: {path} was made with {there}, expected {about}")
        paths.append(path)
        count = sum(len(d.tokens) - d.answer for d in read_dialogues(path))
        found += count
        advance(count)
    return paths


def _check_lengths(model: LoadedModel, questions: Sequence[Sequence[str]], config: DialogueConfig) -> None:
    """Now rather than hours later."""
    for number, turns in enumerate(questions, start=1):
        text, most = "".join(turns), model.config.max_position - len(turns) * config.answer_tokens
        if len(text) > most and (length := len(_tokenizer(model).encode(text))) > most:
            raise ValueError(
                f"prompts: question {number} has {length} tokens, beside {len(turns)} x {config.answer_tokens} of an "
                f"answer the target has room for {most}"
            )


def read_dialogues(path: Path) -> Iterator[Dialogue]:
    """The dialogues of a shard."""
    with safe_open(path, "pt") as shard:
        tokens, starts, answers = (shard.get_tensor(name).tolist() for name in ("tokens", "starts", "answers"))
    for begin, end, answer in zip(starts, starts[1:], answers, strict=False):
        yield Dialogue(tokens[begin:end], answer)


def _engine(model: LoadedModel, config: DialogueConfig) -> Engine:
    _tokenizer(model)
    return Engine(model, drafter="none", max_batch_size=config.dialogues)


def _tokenizer(model: LoadedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise ValueError("target: a model without tokenizer cannot make dialogues")
    return model.tokenizer


def _dialogues(
    engine: Engine, shard: int, config: DialogueConfig, questions: Sequence[Sequence[str]] | None
) -> list[Dialogue]:
    seed = config.seed + shard * _SEEDS
    if questions is None:
        asks = replace(_QUESTIONS, max_new_tokens=config.question_tokens, n=config.dialogues, seed=seed)
        asked = engine.generate(question_prefix(_tokenizer(engine.model)), asks)
        asked = asked if isinstance(asked, list) else [asked]
        questions = [[output.text.strip()] for output in asked if output.text.strip()]
    params = [
        SamplingParams(
            max_new_tokens=config.answer_tokens,
            temperature=config.temperatures[i % len(config.temperatures)],
            seed=seed + config.dialogues + i,
        )
        for i in range(len(questions))
    ]
    chats: list[list[Message]] = [[] for _ in questions]
    made: list[list[int]] = [[] for _ in questions]
    begins = [0] * len(questions)
    for turn in range(max(map(len, questions), default=0)):
        asking = [i for i, turns in enumerate(questions) if turn < len(turns)]
        for i in asking:
            chats[i].append({"role": "user", "content": questions[i][turn]})
        told = engine.generate([chats[i] for i in asking], [params[i] for i in asking])
        for i, each in zip(asking, told, strict=True):
            chats[i].append({"role": "assistant", "content": each.text})
            begins[i] = begins[i] or len(each.prompt_token_ids)
            made[i] = each.prompt_token_ids + each.token_ids
    return [Dialogue(tokens, begin) for tokens, begin in zip(made, begins, strict=True)]


def write_shard(path: Path, dialogues: Sequence[Dialogue], about: dict[str, str]) -> None:
    """Puts a shard in place, whole or not at all. about: what it was made with."""
    starts = torch.tensor([0, *(len(d.tokens) for d in dialogues)]).cumsum(0)
    tensors = {
        "tokens": torch.tensor([token for d in dialogues for token in d.tokens], dtype=torch.int32),
        "starts": starts,
        "answers": torch.tensor([d.answer for d in dialogues], dtype=torch.int32),
    }
    with atomic_file(path) as part:
        save_file(tensors, part, metadata=about)


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as shard:
            return dict(shard.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"data: {path} cannot be read ({error}); remove it to have it made again") from error
