"""Makes training data with the target itself: it answers questions from a file, or questions that it writes.

The content of a shard depends only on the seed and its number, and a shard appears whole or not at all. So an
interrupted run continues with the first missing shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from specengine.engine.engine import Engine
from specengine.rules.base import check_number
from specengine.tensor_parallel.loading import LoadedModel
from specengine.tokenizer import Tokenizer
from specengine.train.data.dialogue_files import Dialogue, read_about, read_dialogues, write_shard
from specengine.types import Message, SamplingParams
from specengine.utils.spec_string import check_range

_MARK = "specengine-question"  # stands for the question in a rendered chat
_SEED_STRIDE = 1_000_003  # between two shards
_QUESTIONS = SamplingParams(temperature=1.0, top_p=0.95)


@dataclass(frozen=True)
class DialogueConfig:
    """The dialogues to make.

    dialogues: per shard.  question_tokens, answer_tokens: the most of each.  temperatures: used for answers in turn.
    Raises ValueError for values out of range.
    """

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


def question_prefix(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of a chat up to the user's first word. Raises ValueError for a model without chat template."""
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    return tokenizer.encode(text.partition(_MARK)[0], add_special_tokens=False)


def read_questions(path: Path) -> list[list[str]]:
    """Reads the user's turns from each line of a JSONL file: `turns` or `prompt`. Raises ValueError naming the line."""
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
    """Writes shards until their answers have `tokens` tokens in all, or every question is answered; returns the paths.

    Existing shards are kept. advance: called with the answer tokens of each shard.
    Raises ValueError for shards of another model or config, and for a model without chat template.
    """
    config = config or DialogueConfig()
    asked = "0" if questions is None else hashlib.sha256(json.dumps(list(questions)).encode()).hexdigest()[:16]
    about = {"model": model.name, "config": json.dumps(asdict(config)), "questions": asked}
    _check_lengths(model, questions or (), config)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    found = 0
    engine = None
    while found < tokens and (questions is None or len(paths) * config.dialogues < len(questions)):
        path = folder / f"dialogues-{len(paths):05d}.safetensors"
        if not path.exists():
            first = len(paths) * config.dialogues
            own = None if questions is None else questions[first : first + config.dialogues]
            engine = engine or _engine(model, config)
            write_shard(path, _dialogues(engine, len(paths), config, own), about)
        elif (there := read_about(path)) != about:
            raise ValueError(f"data: {path} was made with {there}, expected {about}")
        paths.append(path)
        count = sum(len(d.tokens) - d.answer for d in read_dialogues(path))
        found += count
        advance(count)
    return paths


def _check_lengths(model: LoadedModel, questions: Sequence[Sequence[str]], config: DialogueConfig) -> None:
    """Raises ValueError for a question that is too long, before hours of work on the others."""
    for number, turns in enumerate(questions, start=1):
        text = "".join(turns)
        most = model.config.max_position - len(turns) * config.answer_tokens
        if len(text) > most and (length := len(_tokenizer(model).encode(text))) > most:
            raise ValueError(
                f"prompts: question {number} has {length} tokens; the target has room for {most} beside "
                f"{len(turns)} answers of {config.answer_tokens} tokens"
            )


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
    seed = config.seed + shard * _SEED_STRIDE
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
        outputs = engine.generate([chats[i] for i in asking], [params[i] for i in asking])
        for i, each in zip(asking, outputs, strict=True):
            chats[i].append({"role": "assistant", "content": each.text})
            begins[i] = begins[i] or len(each.prompt_token_ids)
            made[i] = each.prompt_token_ids + each.token_ids
    return [Dialogue(tokens, begin) for tokens, begin in zip(made, begins, strict=True)]
