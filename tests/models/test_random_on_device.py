"""Random weights for a GPU. The module needs only torch: a machine with a GPU may have little else."""

from dataclasses import replace

import pytest
import torch

from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or no CUDA in torch")
def test_large_random_weights_are_drawn_on_the_device_and_small_ones_are_the_same_everywhere():
    wide, device = RandomCheckpoint(replace(PRESETS["tiny-llama"], vocab_size=70_000)), torch.device("cuda")
    whole = wide.read_rows("lm_head.weight", 0, 70_000, device)
    assert whole.device.type == "cuda" and torch.equal(
        wide.read_rows("lm_head.weight", 9, 60_001, device), whole[9:60_001]
    )
    assert abs(whole.std().item() - wide.read("lm_head.weight").std().item()) < 1e-3
    narrow = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(wide.read_rows(narrow, 0, 64, device).cpu(), wide.read(narrow))
