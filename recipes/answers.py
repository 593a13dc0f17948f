"""Generates greedy answers to prompts, for a corpus of suffix: python recipes/answers.py prompts.jsonl FOLDER SEED

The data has the form of that of `specengine train`, at temperature 0 only. Existing shards are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specengine.tensor_parallel.loading import load_model
from specengine.train.data.dialogues import DialogueConfig, read_questions, write_dialogues


def main(prompts: Path, folder: Path, seed: int) -> None:
    """Answers all prompts of a file into shards in `folder`."""
    config = DialogueConfig(seed, dialogues=192, temperatures=(0.0,))
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        print(f"{done} tokens", file=sys.stderr)

    model = load_model("smollm2-135m")
    write_dialogues(model, folder, sys.maxsize, config, questions=read_questions(prompts), advance=advance)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
