"""The trainer trains every trainable drafter on a tiny target."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from specengine.train.export import write_drafter
from specengine.train.objectives.registry import OBJECTIVES, new_objective
from specengine.train.run_log import read_log
from tests.train.runs import CONFIG, SHORT, target_weights, trainer

FASTEAGLE = "fasteagle,entry=concat,head=own,markov=4,start=entry"
CONFIG_20 = replace(SHORT, epochs=100, learning_rate=5e-3, batch_tokens=100, evaluate_steps=1000, save_steps=1000)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "spec", [*sorted(OBJECTIVES), "glide,cross=false", "medusa,own_head=true,soft=false", FASTEAGLE]
)
def test_a_run_lowers_the_loss_and_leaves_a_checkpoint(tmp_path, spec):
    torch.manual_seed(0)
    objective = new_objective(spec, target_weights(torch.arange(0, CONFIG.vocab_size, 2)))
    run = trainer(tmp_path / "out", CONFIG_20, made=objective)
    run._plan = run._plan[:20]
    run.run()
    steps = [line for line in read_log(tmp_path / "out/training.jsonl") if "held_out" not in line]
    first, last = (sum(sum(line["loss"]) for line in part) for part in (steps[:3], steps[-3:]))
    assert len(steps) == 20 and last < 0.95 * first

    json, tensors = objective.export()
    write_drafter(tmp_path / "drafter", json, tensors, "float32", "")
    with safe_open(tmp_path / "drafter/model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "spec", [*sorted(OBJECTIVES), "eagle3,fc_norm=true", "glide,cross=false", "medusa,own_head=true", FASTEAGLE]
)
def test_training_can_start_from_an_exported_drafter(spec):
    torch.manual_seed(0)
    made = new_objective(spec, target_weights(torch.arange(0, CONFIG.vocab_size, 2)))
    if hasattr(made.network, "tap_scale"):
        made.network.tap_scale.copy_(torch.tensor([0.5, 2.0, 30.0]))
    with torch.no_grad():
        for parameter in made.network.parameters():
            parameter.add_(torch.randn_like(parameter))
    state = {name: tensor.clone() for name, tensor in made.network.state_dict().items()}
    back = made.adopted({name: tensor.clone() for name, tensor in made.export()[1].items()})
    assert back.keys() == state.keys()
    assert all(torch.allclose(back[name], state[name], rtol=1e-6) for name in state)
