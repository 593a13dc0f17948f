"""Imports the scripts of bench/gpu, which are no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "gpu"


def loaded(name: str) -> ModuleType:
    """A module of bench/gpu, skipping where the tests run without it."""
    if not FOLDER.is_dir():
        pytest.skip("the tests run without the repository's bench folder")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
