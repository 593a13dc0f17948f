"""The questions that exactness is tested with."""

import json
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
# 15 of MT-bench (Apache-2.0) and 15 of HumanEval (MIT): first turns
QUESTIONS = [json.loads(line)["turns"][0] for line in (DATA / "questions.jsonl").read_text().splitlines()]


def chats(questions):
    return [[{"role": "user", "content": question}] for question in questions]
