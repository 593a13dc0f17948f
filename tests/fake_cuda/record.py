"""Writes launches.json after a change that launches fewer kernels or needs more: `python -m tests.fake_cuda.record`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.fake_cuda.build import FakeMachine
from tests.fake_cuda.cases import CASES, RECORDED, launches_of, totals, write_drafters
from tests.fake_cuda.mode import FakeCuda


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, FakeCuda() as device:
        drafters = write_drafters(Path(folder))
        machine = FakeMachine(device, patch)
        target = machine.target()
        for name, case in CASES.items():
            found[name] = totals(launches_of(machine, target, case, drafters))
            print(name, found[name])
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
