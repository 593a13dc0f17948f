"""What a run needs before its first step: packages, and a GPU unless it is dry."""

from __future__ import annotations

import subprocess
import sys

PACKAGES = ("torch", "pybind11", "pytest")  # of nearly every step
ASK = """
import importlib, sys
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        text = " ".join(str(error).split())
        sys.exit(f"{name} cannot be imported: {type(error).__name__}: {text}")
if sys.argv[1] == "gpu" and not sys.modules["torch"].cuda.is_available():
    sys.exit("no GPU was found; try --dry-run")
"""


def lacking(dry: bool, environment: dict[str, str]) -> str | None:
    """Returns what the machine lacks for the steps in one line, None if it has all.

    A process of its own asks, with the environment of the steps: this one shall not hold the GPU.
    """
    command = [sys.executable, "-c", ASK, "dry" if dry else "gpu", *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"torch and its GPU were looked for, and Python ended with {done.returncode}"
