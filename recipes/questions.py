"""Generates questions with the target, as prompts: python recipes/questions.py COUNT SEED >> prompts.jsonl"""

from __future__ import annotations

import json
import sys

from specengine import Engine, SamplingParams
from specengine.train.data.dialogues import question_prefix


def main(count: int, seed: int) -> None:
    """Prints one prompt a line."""
    engine = Engine("smollm2-135m", drafter="none", max_batch_size=64)
    params = SamplingParams(max_new_tokens=96, n=count, seed=seed << 20, temperature=1.0, top_p=0.95)
    for output in engine.generate(question_prefix(engine.tokenizer), params):
        if output.text.strip():
            print(json.dumps({"turns": [output.text.strip()]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
