"""Small mixtures of experts for the tests of writers: a config for each family, and folders of floats."""

import json
from dataclasses import replace

from safetensors.torch import save_file

from specengine.models.config import MoeConfig
from specengine.models.presets import PRESETS
from specengine.quantise.hf_config import config_json
from tests.quantise.written import folder_name

# columns of attention make groups of 64, those of experts of 32, those of a shared expert's down_proj of 128
EXPERTS = {
    "mixtral": MoeConfig(4, 2, 96),
    "qwen2_moe": MoeConfig(4, 2, 96, renormalise=False, shared_size=128, shared_gate=True),
    "qwen3_moe": MoeConfig(4, 2, 96),
    "olmoe": MoeConfig(4, 2, 96, renormalise=False),
}


def config_of(family):
    preset = PRESETS[f"tiny-{family.replace('_', '-')}"]
    inner = 96 if family in ("mixtral", "olmoe") else 384
    sizes = {"hidden_size": 192, "intermediate_size": inner, "num_layers": 2, "head_dim": 32, "num_heads": 6}
    return replace(preset, **sizes, rms_norm_eps=2**-16, moe=EXPERTS[family])


def float_folder(folder, config, state):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(config, "test")))
    save_file({folder_name(name, config): value for name, value in state.items()}, folder / "model.safetensors")
    return folder
