"""Packed drafters: a file gives back what was packed, and rounding spares what the loss feels."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.models.draft_files import Bases
from specengine.models.quantised.packed_weights import FILENAME, PackedMatrix, unpack, write_packed
from specengine.train.export import write_drafter
from specengine.train.packing import Curvature, pack, rounded


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def flat(rows, columns):
    return Curvature(torch.ones(rows), torch.eye(columns))


def folder(path, tensors, sources=(), rise=0.01):
    path.mkdir()
    (path / "config.json").write_text("{}")
    shapes = {name: tensor.shape for name, tensor in tensors.items() if tensor.ndim == 2 and name != "plain.weight"}
    pack(path / FILENAME, tensors, {name: flat(*shape) for name, shape in shapes.items()}, rise, sources)
    return open_draft_checkpoint(path)


@pytest.mark.parametrize("most, columns", [(7, 32), (8, 32), (7, 31), (127, 32)])
def test_codes_steps_and_other_tensors_come_back(tmp_path, most, columns):
    torch.manual_seed(0)
    codes = torch.randint(-most, most + 1, (6, columns)).to(torch.int8)
    packed = PackedMatrix(codes, torch.tensor([3, 1, 2, 1, 0.5, 9], dtype=torch.float16))
    others = {"norm": torch.randn(5).bfloat16(), "d2t": torch.tensor([4, 4, 9]), "t2d": torch.tensor([True, False])}
    write_packed(tmp_path / "x", {"w": packed, **others}, {})
    out = unpack(tmp_path / "x", lambda source: "", lambda *base: None)
    assert torch.equal(out.pop("w"), codes * packed.steps.float()[:, None])
    assert out.keys() == others.keys() and all(torch.equal(out[name], others[name]) for name in others)


def test_small_differences_take_few_bytes_and_land_within_a_step(tmp_path):
    torch.manual_seed(0)
    base = torch.randn(64, 128)
    write_drafter(tmp_path / "base", {}, {"a.weight": base}, "float32", "# card\n")
    near = base + 0.01 * torch.randn(64, 128)
    sizes = {}
    for name, sources in (("alone", ()), ("near", ("../base",))):
        read = folder(tmp_path / name, {"b.weight": near}, sources, rise=0.003)
        sizes[name] = (tmp_path / name / FILENAME).stat().st_size
        assert 0.003 < (read.read("b.weight") - near).square().mean().sqrt() < 0.02
    assert sizes["near"] < 0.55 * sizes["alone"]


def test_rows_of_a_vocabulary_are_matched_by_their_tokens(tmp_path):
    torch.manual_seed(0)
    table = torch.randn(40, 64)
    ours, theirs = torch.arange(0, 40, 2), torch.arange(0, 40, 4)
    both = {"theirs": theirs, "ours": ours}
    tensors = {n: {"head.weight": table[t].clone(), "d2t": t - torch.arange(len(t))} for n, t in both.items()}
    write_drafter(tmp_path / "theirs", {}, tensors["theirs"], "float32", "# card\n")
    base = Bases(tmp_path / "theirs").read("../theirs", "head.weight", (20, 32), ours)  # their last columns
    assert torch.equal(base[::2], table[theirs, 32:]) and not base[1::2].any()
    read = folder(tmp_path / "ours", tensors["ours"], ("../theirs",), rise=0.5).read("head.weight")
    error = (read - table[ours]).abs().amax(1)
    assert error[::2].max() < 0.02  # the base has them
    assert error[1::2].min() > 0.03


def test_what_a_row_means_to_the_loss_decides_its_step_and_errors_are_made_good_behind():
    torch.manual_seed(0)
    matrix = torch.randn(32, 64)
    _, steps = rounded(matrix, Curvature(torch.tensor([4.0] * 16 + [1.0] * 16), torch.eye(64)), 0.003)
    assert steps[0].item() == pytest.approx(steps[31].item() / 2, rel=2e-3)
    inputs = torch.randn(500, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(500, 64)  # columns that go together
    columns = inputs.T @ inputs
    codes, steps = rounded(matrix, Curvature(torch.ones(32), columns), 0.003)
    steps = steps.float()[:, None]

    def cost(values):
        error = values - matrix
        return float(((error @ columns) * error).sum())

    assert cost(codes * steps) < 0.5 * cost((matrix / steps).round() * steps)


def test_an_unpacked_drafter_is_kept_and_made_again_where_the_file_is_damaged(tmp_path, cache):
    tensors = {"a.weight": torch.randn(8, 32), "plain.weight": torch.randn(8, 32), "norm.weight": torch.ones(4)}
    first = folder(tmp_path / "drafter", tensors)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    assert first.tensors["a.weight"].dtype == "Q8_0" and len(whole) > 8 * 32
    assert (first.read("plain.weight") - tensors["plain.weight"]).abs().max() < 0.05  # no gradients: 8 bits
    kept.write_bytes(b"damaged")
    assert torch.equal(open_draft_checkpoint(tmp_path / "drafter").read("a.weight"), first.read("a.weight"))
    assert kept.read_bytes() == whole
    kept.unlink()
    cache.rmdir()
    cache.write_text("no folder")
    assert torch.equal(open_draft_checkpoint(tmp_path / "drafter").read("a.weight"), first.read("a.weight"))


def test_another_base_and_damaged_files_are_refused(tmp_path):
    base = torch.randn(8, 32)
    write_drafter(tmp_path / "base", {}, {"a.weight": base}, "float32", "# card\n")
    folder(tmp_path / "drafter", {"a.weight": base + 0.01}, ("../base",), rise=1e-4)
    write_drafter(tmp_path / "base", {}, {"a.weight": base + 1}, "float32", "# card\n")
    for each in (tmp_path / "cache" / "weights").iterdir():
        each.unlink()
    with pytest.raises(ValueError, match=r"made from another \.\./base than the one here"):
        open_draft_checkpoint(tmp_path / "drafter")
    file = tmp_path / "drafter" / FILENAME
    packed_a = load_file(file)
    save_file(load_file(file), file)
    with pytest.raises(ValueError, match="packed weights cannot be read: its format is not"):
        open_draft_checkpoint(tmp_path / "drafter")
    save_file(load_file(file), file, {"format": "specengine-packed-1", "sources": "{}", "index": json.dumps({"b": {}})})
    with pytest.raises(ValueError, match="packed weights cannot be read"):
        open_draft_checkpoint(tmp_path / "drafter")
    write_packed(file, {"zeros": torch.zeros(1 << 25, dtype=torch.bool)}, {})  # 33 kB
    with pytest.raises(ValueError, match="is empty, or too large for the file"):
        open_draft_checkpoint(tmp_path / "drafter")
    index = {"a.weight": {"shape": [8, 32], "base": ["/etc", "a.weight"]}}
    save_file(packed_a, file, {"format": "specengine-packed-1", "sources": "{}", "index": json.dumps(index)})
    with pytest.raises(ValueError, match="its source '/etc' has no digest"):
        open_draft_checkpoint(tmp_path / "drafter")
    for wrong in ([1 << 21, 32], [-8, 32], [0, 32]):
        index = {"a.weight": {"shape": wrong, "base": None}}
        save_file(packed_a, file, {"format": "specengine-packed-1", "sources": "{}", "index": json.dumps(index)})
        with pytest.raises(ValueError, match="is empty, or too large for the file"):
            open_draft_checkpoint(tmp_path / "drafter")
    for source in ("../..", "/etc", "../a/b", "base"):
        write_packed(file, {}, {source: ""})
        with pytest.raises(ValueError, match=r"base: expected .* or \.\./NAME, got"):
            open_draft_checkpoint(tmp_path / "drafter")
