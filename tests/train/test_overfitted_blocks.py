"""A block drafter that has learned eight texts by heart drafts them whole, through the loop that users run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.train.config import TrainConfig
from specengine.train.data.dialogue_files import Dialogue, write_shard
from specengine.train.export import write_drafter
from specengine.train.objectives.base import Objective
from specengine.train.objectives.registry import new_objective
from tests.engines import tiny_model
from tests.train import runs

BLOCK = 4
TOKENS = 24  # of an answer
STEPS = TrainConfig(epochs=120, learning_rate=4e-3, batch_tokens=1024, rows=1024, evaluate_steps=1000, save_steps=1000)
PROMPTS = [[3 * i + 1, 5 * i + 2, 90 - i, 7 * i + 3, i + 20] for i in range(8)]


def engine_of(drafter: str) -> Engine:
    model = replace(tiny_model(), name="random:seven-layers", target=runs.TARGET, eos_token_ids=frozenset())
    return Engine(model, drafter=drafter, max_batch_size=1)


def tokens_per_cycle(objective: Objective, folder: Path, params: SamplingParams, texts: list[list[int]]) -> float:
    """Checks that the drafter changes no text, and returns the mean over the texts."""
    write_drafter(folder, *objective.export(), "float32", "")
    outputs = engine_of(f"{objective.name}:{folder},adaptive=false,tree=chain").generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == texts
    return sum(output.stats.tau for output in outputs) / len(outputs)


@pytest.mark.full
@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:drafter")  # an untrained one guesses nothing
@pytest.mark.parametrize("spec", ["dspark,block=4,markov=8", "jetspec,block=4", "dflash,block=4"])
def test_eight_learned_texts_are_drafted_whole(tmp_path, spec):
    params = SamplingParams(max_new_tokens=TOKENS)
    texts = [output.token_ids for output in engine_of("none").generate(PROMPTS, params)]
    learned = [Dialogue(prompt + text, len(prompt)) for prompt, text in zip(PROMPTS, texts, strict=True)]
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/dialogues-00000.safetensors", learned * 2, {})  # a part is held out
    torch.manual_seed(0)
    objective = new_objective(f"{spec},anchors=0", runs.target_weights())
    before = tokens_per_cycle(objective, tmp_path / "before", params, texts)
    runs.trainer(tmp_path / "out", STEPS, made=objective).run()
    assert before < 2 < objective.levels < tokens_per_cycle(objective, tmp_path / "after", params, texts)
