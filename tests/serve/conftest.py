"""Where what the server needs is not installed, its tests are skipped."""

from importlib.util import find_spec

import pytest

MISSING = [name for name in ("fastapi", "uvicorn", "openai", "httpx") if find_spec(name) is None]


class Skipped(pytest.File):
    def collect(self):
        pytest.skip(f"not installed: {', '.join(MISSING)} (pip install 'specengine[test]')", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Skipped.from_parent(parent, path=module_path) if MISSING else None
