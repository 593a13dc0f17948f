"""The files of a trained drafter."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specengine.train.export import stored, write_drafter


def test_int8_codes_and_scales_give_the_matrix_back_to_half_a_step():
    torch.manual_seed(0)
    matrix = torch.randn(6, 96) * torch.logspace(-3, 1, 6)[:, None]
    matrix[2, 32:64] = 0
    out = stored({"x.weight": matrix}, "int8")
    codes, scale = out["x.weight"], out["x.weight_scale"]
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float16, (6, 3))
    back = codes.float() * scale.float().repeat_interleave(32, 1)
    step = scale.float().repeat_interleave(32, 1)
    assert ((back - matrix).abs() <= 0.55 * step + 1e-7).all()
    assert (back[2, 32:64] == 0).all()


def test_matrices_without_blocks_of_32_columns_stay_floats_and_integers_stay():
    tensors = {"narrow.weight": torch.ones(4, 48), "norm.weight": torch.ones(32), "d2t": torch.arange(4)}
    out = stored(tensors, "int8")
    assert {name: tensor.dtype for name, tensor in out.items()} == {
        "narrow.weight": torch.bfloat16,
        "norm.weight": torch.bfloat16,
        "d2t": torch.int64,
    }


@pytest.mark.parametrize(("storage", "dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_a_drafter_is_a_folder_with_config_weights_and_card(tmp_path, storage, dtype):
    write_drafter(tmp_path / "new/folder", {"hidden_size": 2}, {"x.weight": torch.ones(2, 2)}, storage, "# card\n")
    folder = tmp_path / "new/folder"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text()) == {"hidden_size": 2}
    assert load_file(folder / "model.safetensors")["x.weight"].dtype == dtype
