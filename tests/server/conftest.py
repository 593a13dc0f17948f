"""Skips the server's tests if a package is missing, and slows down cycles for tests of disconnects."""

import time
from importlib.util import find_spec

import pytest

MISSING = [name for name in ("fastapi", "uvicorn", "openai", "httpx") if find_spec(name) is None]


class Skipped(pytest.File):
    def collect(self):
        pytest.skip(f"not installed: {', '.join(MISSING)} (pip install 'specengine[test]')", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Skipped.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture
def slow(monkeypatch):
    """Slows down every cycle, so that a text outlasts its client."""

    from specengine.engine.cycle import Cycle

    cycle = Cycle.run

    def slowly(self, batch):
        time.sleep(0.02)
        return cycle(self, batch)

    monkeypatch.setattr(Cycle, "run", slowly)


@pytest.fixture(scope="module")
def serve():
    """Returns a function that starts a server whose model says what the test wants."""
    from tests.server.tools import scripted_servers

    with scripted_servers() as start:
        yield start
