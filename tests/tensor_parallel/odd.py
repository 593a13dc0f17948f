"""A model that divides unevenly: 9 heads on 3 key/value heads, with every possible bias."""

import dataclasses
import json
from pathlib import Path

from specengine.models.presets import PRESETS
from tests.models.files import CONFIG_JSON, random_state, write_folder

ODD = dataclasses.replace(
    PRESETS["tiny-llama"], num_heads=9, num_kv_heads=3, qkv_bias=True, output_bias=True, mlp_bias=True
)


def odd_folder(folder: Path) -> Path:
    write_folder(folder, random_state(ODD))
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
    biases = {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | heads | biases))
    return folder
