"""Imports the Python scripts of .ci, which have no suffix."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / ".ci"


def loaded(name: str) -> ModuleType:
    """A script of .ci, skipping where the tests run without it."""
    if not (FOLDER / name).is_file():
        pytest.skip("the tests run without the repository's .ci folder")
    loader = SourceFileLoader(name, str(FOLDER / name))
    module = module_from_spec(spec_from_loader(name, loader))
    loader.exec_module(module)
    return module
