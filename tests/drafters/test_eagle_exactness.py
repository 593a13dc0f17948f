"""On the real model EAGLE drafters of random weights, right or wrong, change no token."""

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.tensor_parallel.loading import load_model
from tests.data.questions import QUESTIONS, chats
from tests.drafters.eagle_files import CONFIG, eagle1_state, eagle3_state, write_drafter
from tests.engines import ids
from tests.selection import wide

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore:drafter")]
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "draft_vocab_size": 8192,
    "eagle_aux_hidden_state_layer_ids": None,
}
CASES = {
    "eagle3": "adaptive=false",
    "eagle3, chain": "top_k=1,levels=4,nodes=5,adaptive=false",
    "eagle3, what pays": "",
    "eagle3, backbone": "top_k=3,levels=5,beam=1,adaptive=false",
    "eagle, static": "tree=eagle_25,adaptive=false",
    "eagle, wide": "top_k=30,levels=2,nodes=128,adaptive=false",
}


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model(smollm2_path, device="cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(1)
    config, folder = CONFIG | SIZES, tmp_path_factory.mktemp("drafters")
    states = {"eagle3": eagle3_state(config, target=576), "eagle": eagle1_state(config)}
    # from a hidden state its own token is the best guess, which is right where a text repeats a token
    states["eagle"]["fc.weight"] = torch.cat([torch.zeros(576, 576), torch.eye(576)], dim=1)
    states["eagle"]["fc.bias"].zero_()
    return {name: write_drafter(folder / name, config, state) for name, state in states.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=8),
        SamplingParams(max_new_tokens=8, temperature=0.8, seed=17),
    ],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("case, options", wide(CASES.items(), 2), ids=CASES)
def test_speculation_changes_no_token(model, folders, case, options, params):
    name, prompts = case.split(",")[0], chats(QUESTIONS[::8])
    spec = ",".join(part for part in (f"{name}:{folders[name]}", options) if part)
    plain = ids(Engine(model, drafter="none", max_batch_size=4).generate(prompts, params))
    for batch in (1, 4):
        assert ids(Engine(model, drafter=spec, max_batch_size=batch).generate(prompts, params)) == plain
