"""Tensors are made once, and again where what made them is another, or where their file is damaged or not allowed."""

import os

import pytest
import torch

from specengine.utils import kept_tensors as module
from specengine.utils.kept_tensors import kept_tensors

MADE = {
    "codes": torch.arange(-40, 40).to(torch.int8).view(4, 20),
    "scales": torch.randn(7).half(),
    "one": torch.tensor(3),
    "none": torch.empty(0),
    "turned": torch.arange(6, dtype=torch.int32).view(2, 3).T,
}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Counts the makings. The list's `folder` has their files."""
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))
    return []


def tensors(made, key="key"):
    found = kept_tensors(key, lambda: made.append(key) or MADE)
    assert found.keys() == MADE.keys()
    for name, tensor in found.items():
        assert tensor.dtype == MADE[name].dtype and torch.equal(tensor, MADE[name]), name
    return len(made)


def test_they_are_made_once_and_a_use_is_noted(made, tmp_path):
    assert tensors(made) == 1
    (file,) = (tmp_path / "weights").iterdir()
    os.utime(file, (1, 1))
    assert tensors(made) == 1
    assert file.stat().st_mtime > 1  # it is not the first to go
    assert tensors(made, "other key") == 2


def test_other_code_makes_them_anew(made, monkeypatch):
    tensors(made)
    monkeypatch.setattr(module, "code_that_packs", lambda: ["other"])
    assert tensors(made) == 2


def test_a_file_that_cannot_be_touched_is_read_all_the_same(made, monkeypatch):
    tensors(made)

    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert tensors(made) == 1


def test_a_damaged_file_and_a_cache_that_is_off_or_in_the_way_cost_a_making(made, tmp_path, monkeypatch):
    tensors(made)
    (file,) = (tmp_path / "weights").iterdir()
    content = file.read_bytes()
    for number, damaged in enumerate((b"", content[:-1], content[:4200] + b"x" + content[4201:], b"x" + content[1:])):
        file.write_bytes(damaged)
        assert tensors(made) == number + 2
    file.unlink()
    (tmp_path / "weights").rmdir()
    (tmp_path / "weights").write_text("no folder")
    assert tensors(made) == 6
    monkeypatch.setenv("SPECENGINE_CACHE", "off")
    assert tensors(made) == 7
