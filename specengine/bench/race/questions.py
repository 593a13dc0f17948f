"""Questions of one or more turns, and the prompt of each turn."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specengine.tensor_parallel.loading import LoadedModel
from specengine.types import GenerationOutput, Prompt, SamplingParams

BUILT_IN = Path(__file__).parents[1] / "data" / "prompts.jsonl"
SCHEMAS = BUILT_IN.with_name("schemas.jsonl")  # questions of agents, each with a schema; thirty have fixed keys
RANDOM_TOKENS = 32


@dataclass(frozen=True)
class Question:
    """Holds the user turns of one conversation.

    name: for messages.  category: class of the question.
    tokens: length of a turn for a model without a tokenizer.  json_schema: of all its answers, if any.
    """

    name: str
    turns: tuple[str, ...]
    category: str = ""
    tokens: int = RANDOM_TOKENS
    json_schema: str | None = None

    def params(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters of its answers."""
        return params if self.json_schema is None else replace(params, json_schema=self.json_schema)


def load_files(
    paths: Sequence[Path] = (BUILT_IN,),
    limit: int | None = None,
    per_class: int | None = None,
    tokens: int = RANDOM_TOKENS,
) -> list[Question]:
    """Reads the first `limit` questions of each file, at most `per_class` of each class (None: all).

    Raises FileNotFoundError, or ValueError naming file and line.
    """
    _check_count("per_class", per_class)
    if tokens < 1:
        raise ValueError(f"prompt_tokens: expected a positive number of tokens, got {tokens}")
    questions: list[Question] = []
    for path in paths:
        for question in load_questions(path, limit):
            name = question.name if len(paths) == 1 else f"{path.stem}:{question.name}"
            if per_class is None or sum(q.category == question.category for q in questions) < per_class:
                questions.append(replace(question, name=name, tokens=tokens))
    return questions


def load_questions(path: Path = BUILT_IN, limit: int | None = None) -> list[Question]:
    """Reads the first `limit` questions (None: all) of a JSONL file in MT-bench form: objects with `turns`.

    `question_id` defaults to the line number and `category` to the file name. `json_schema` constrains the answers.
    Other keys and blank lines are ignored.
    Raises FileNotFoundError, or ValueError naming file and line.
    """
    _check_count("limit", limit)
    if not path.is_file():
        raise FileNotFoundError(f"questions: no such file {str(path)!r}")
    try:
        # splitlines would also split at U+2028, which a JSON string may hold unescaped.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, byte {error.start} is not") from None
    questions = [_parse(path, n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not questions:
        raise ValueError(f"{path}: holds no questions")
    return questions[:limit]


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name}: expected a positive number of questions, got {value}")


def _parse(path: Path, number: int, line: str) -> Question:
    where = f"{path}, line {number}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected one JSON object per line: {error}") from None
    if not isinstance(data, dict) or "turns" not in data:
        raise ValueError(f'{where}: expected an object with "turns", got {line.strip()[:60]!r}')
    turns = data["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError(
            f'{where}: "turns" must be a list of one or more non-empty strings, got {type(turns).__name__}'
        )
    name = data.get("question_id", number)
    category = data.get("category") or path.stem
    if not isinstance(name, str | int | float) or not isinstance(category, str | int | float):
        raise ValueError(f'{where}: "question_id" and "category" must be texts or numbers')
    try:
        schema = SamplingParams(json_schema=data.get("json_schema")).json_schema
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    assert schema is None or isinstance(schema, str)  # SamplingParams keeps its text
    return Question(str(name), tuple(turns), str(category), json_schema=schema)


def prompt_of(question: Question, answers: Sequence[GenerationOutput], model: LoadedModel, seed: int = 0) -> Prompt:
    """Returns the prompt of turn len(answers): all turns so far with the answers between them.

    It is a list of chat messages for a model with a chat template, and plain text for other models.
    Without a tokenizer it is a list of random token ids; `seed`, question and turn determine them.
    """
    turns = question.turns[: len(answers) + 1]
    if model.tokenizer is None:
        ids: list[int] = []
        for number in range(len(turns)):
            draw = random.Random(f"{seed} {question.name} {number}")
            ids += draw.choices(range(model.config.vocab_size), k=question.tokens)
            ids += answers[number].token_ids if number < len(answers) else []
        return ids
    if model.tokenizer.has_chat_template:
        user = [{"role": "user", "content": turn} for turn in turns]
        assistant = [{"role": "assistant", "content": answer.text} for answer in answers]
        return [message for pair in zip(user, assistant, strict=False) for message in pair] + user[-1:]
    texts = [text for turn, answer in zip(turns, answers, strict=False) for text in (turn, answer.text)]
    return "\n\n".join([*texts, turns[-1]])
